"""A team's own instances: no other team's jobs come to them, no other's instances reach them."""

import json
from dataclasses import replace
from typing import Any

import pytest

from infra.stages import Stage, Team
from jobs.contract.queues import QUEUES
from tests.support.infra.deployed_roles import ACCOUNT, REGION, DeployedStage
from tests.support.infra.instances import (
    CPU,
    GAUDI,
    all_environments,
    boot_parts,
    capacity,
    launch_data,
    queue_environments,
    queues,
)
from tests.support.infra.synthesis import Templates, resources, stacks_of

LIMITS: dict[str, Any] = {
    "name": "test",
    "region": "us-east-1",
    "max_nodes": 3,
    "max_on_demand_nodes": 2,
    "max_multinode_nodes": 2,
    "fsx_gib": 1_200,
    "interface_endpoints": True,
}
SHARED = Stage(**LIMITS, teams=tuple(Team(name=name, shares_instances=True) for name in ("health", "product")))
BESIDE = Stage(**LIMITS, teams=(Team(name="health"), Team(name="product", shares_instances=True)))
APART = Stage(**LIMITS, teams=(Team(name="health"), Team(name="product")))
OWN = f"{GAUDI}-of-health"
AGENT = "ecs:Poll"
MEMBER = f"arn:aws:ecs:{REGION}:{ACCOUNT}:container-instance/AWSBatch-x/0f0f"


@pytest.fixture(scope="module")
def before() -> Templates:
    return stacks_of(SHARED)


@pytest.fixture(scope="module")
def apart() -> Templates:
    return stacks_of(APART)


@pytest.fixture(scope="module")
def after() -> Templates:
    return stacks_of(BESIDE)


def test_by_default_each_team_has_queues_and_instances_to_itself(apart: Templates) -> None:
    compute = apart["compute"]
    assert queues(compute, None) == {}, "none is there for several teams"
    of_teams = {
        team: {item for name in queues(compute, team) for item in queue_environments(compute, name, team)}
        for team in ("health", "product")
    }
    assert queues(compute, "health").keys() == queues(compute, "product").keys() == QUEUES.keys()
    assert of_teams["health"] | of_teams["product"] == all_environments(compute).keys()
    assert not of_teams["health"] & of_teams["product"]
    # A security group and a role each, and no third one for all.
    assert len(resources(compute, "AWS::EC2::SecurityGroup")) == 2
    roles = [name for name in resources(compute, "AWS::IAM::Role") if "InstanceRole" in name]
    assert sorted(name.removeprefix("isolated").partition("Instance")[0] for name in roles) == ["health", "product"]
    groups = {
        name: {str(group) for group in _groups_of_environment(compute, name)} for name in all_environments(compute)
    }
    for name, its in groups.items():
        assert len(its) == 1, name
    assert len(set().union(*groups.values())) == 2
    assert APART.queue_count == len(resources(compute, "AWS::Batch::JobQueue")) == len(all_environments(compute)) == 8


def test_a_team_that_comes_leaves_what_the_first_one_has_as_it_was(apart: Templates) -> None:
    # GIVEN a stage with one team, whose jobs wait and run
    alone = stacks_of(Stage(**LIMITS, teams=APART.teams[:1]))["compute"]["Resources"]
    # WHEN another one comes
    both = apart["compute"]["Resources"]
    # THEN nothing but the list of shares changes of what was there
    changed = [name for name, item in alone.items() if both[name].get("Properties") != item.get("Properties")]
    assert [alone[name]["Type"] for name in changed] == ["AWS::Batch::SchedulingPolicy"]


def test_nothing_of_the_others_changes_but_what_their_instances_may_do(before: Templates, after: Templates) -> None:
    # A new logical id, or another name of an instance, would end what waits and runs.
    old, new = before["compute"]["Resources"], after["compute"]["Resources"]
    changed = [name for name, item in old.items() if new[name].get("Properties") != item.get("Properties")]
    # The one thing that changes: instances that teams share are denied to speak as one of that team's.
    (policy,) = changed
    assert old[policy]["Type"] == "AWS::IAM::Policy"
    denied = [
        {statement["Sid"]: statement for statement in template[policy]["Properties"]["PolicyDocument"]["Statement"]}
        for template in (old, new)
    ]
    assert denied[1].keys() - denied[0].keys() == {"InstancesOfOtherTeams"}
    assert {sid: denied[1][sid] for sid in denied[0]} == denied[0]
    assert not [name for name in new.keys() - old.keys() if "health" not in name]
    assert before["network"] == after["network"]
    assert before["jobs"]["Resources"].keys() == after["jobs"]["Resources"].keys()


def test_it_has_every_queue_of_the_stage_to_itself_on_instances_of_its_own(after: Templates) -> None:
    compute = after["compute"]
    assert queues(compute, "health").keys() == QUEUES.keys()
    assert queues(compute, None).keys() == QUEUES.keys(), "the others have theirs as before"
    assert queue_environments(compute, "spot", "health") == [f"{OWN}-spot", f"{OWN}-on-demand"]
    assert queue_environments(compute, "on-demand", "health") == [f"{OWN}-on-demand"]
    assert queue_environments(compute, "multinode", "health") == [f"{OWN}-multinode"]
    assert queue_environments(compute, "cpu-spot", "health") == [f"{CPU}-of-health-spot"]
    assert queue_environments(compute, "spot", None) == [f"{GAUDI}-spot", f"{GAUDI}-on-demand"]
    # Each with the stage's limit once more, and launch templates that no other environment uses.
    assert capacity(compute, f"{OWN}-spot")["MaxvCpus"] == capacity(compute, f"{GAUDI}-spot")["MaxvCpus"] == 3 * 96
    templates = [
        item["ComputeResources"]["LaunchTemplate"]["LaunchTemplateId"]["Ref"]
        for item in all_environments(compute).values()
    ]
    assert len(set(templates)) == len(templates) == 8


def test_its_security_group_admits_its_own_members_and_nobody_else(after: Templates) -> None:
    compute = after["compute"]
    ((group, properties),) = resources(compute, "AWS::EC2::SecurityGroup").items()
    own = {"Fn::GetAtt": [group, "GroupId"]}
    assert "SecurityGroupIngress" not in properties
    for name in all_environments(compute):
        groups = _groups_of_environment(compute, name)
        assert groups
        assert all((group == own) is ("-of-health" in name) for group in groups), name
    let_in = [
        rule["SourceSecurityGroupId"]
        for rule in resources(compute, "AWS::EC2::SecurityGroupIngress").values()
        if rule["GroupId"] == own
    ]
    servers = {"Ref": _parameter(compute, "/trainyard/test/security-group/fsx")}
    assert [source for source in let_in if source not in (own, servers)] == []
    assert own in let_in, "ranks of one job reach each other"
    # It reaches what instances have to: file servers, and AWS through the stage's endpoints.
    admitted = [
        (rule["GroupId"], rule["FromPort"])
        for rule in resources(compute, "AWS::EC2::SecurityGroupIngress").values()
        if rule.get("SourceSecurityGroupId") == own and rule["GroupId"] != own
    ]
    endpoints = {"Ref": _parameter(compute, "/trainyard/test/security-group/endpoints")}
    assert admitted == [(endpoints, 443), (servers, 988), (servers, 1018)]
    fsx, network = after["storage"], after["network"]
    assert _value(fsx, "/trainyard/test/security-group/fsx") in _groups_of(fsx, "AWS::FSx::FileSystem")
    assert _value(network, "/trainyard/test/security-group/endpoints") in _groups_of(network, "AWS::EC2::VPCEndpoint")


def test_the_group_of_file_servers_outlives_them_as_rules_of_teams_may_name_it(after: Templates) -> None:
    without = stacks_of(replace(BESIDE, fsx_gib=0))
    name = "/trainyard/test/security-group/fsx"
    # The storage stack is deployed first: EC2 would refuse to delete a group that rules of the compute stack name.
    group = _value(after["storage"], name)["Fn::GetAtt"][0]
    assert without["storage"]["Resources"][group] == after["storage"]["Resources"][group]
    assert resources(without["storage"], "AWS::FSx::FileSystem") == {}
    for direction in ("Ingress", "Egress"):
        assert resources(without["storage"], f"AWS::EC2::SecurityGroup{direction}") == {}
    assert name not in json.dumps(without["compute"])


def test_what_its_instances_are_called_and_tagged_names_the_team_from_the_start(after: Templates) -> None:
    compute = after["compute"]
    names = [item["ComputeResources"]["Tags"]["Name"] for item in all_environments(compute).values()]
    # Trap: watch_instances tells environments apart by their instances' names.
    assert len(set(names)) == len(names)
    for name, item in all_environments(compute).items():
        team = "health" if "-of-health" in name else None
        assert item["ComputeResources"]["Tags"].get("trainyard:team") == team
        assert item["Tags"].get("trainyard:team") == team
        scripts = "\n".join(text for _, text in boot_parts(launch_data(compute, name)))
        tag = 'ECS_CONTAINER_INSTANCE_TAGS={"trainyard:team":"health"}'
        assert (tag in scripts.splitlines()) is (team is not None)


def test_keys_of_an_instance_are_no_use_against_another_teams_instances(before: Templates, after: Templates) -> None:
    stage = DeployedStage("test", after)
    shared, own = stage.role("compute", "InstanceRole"), stage.role("compute", "isolatedhealthInstanceRole")
    of_team = {"aws:ResourceTag/trainyard:team": "health"}
    of_another = {"aws:ResourceTag/trainyard:team": "finance"}
    for role, context, allowed in (
        (shared, {}, True),
        (shared, of_team, False),
        (own, of_team, True),
        (own, {}, True),  # before it has tagged itself
        (own, of_another, False),
    ):
        assert (role.decide_in(AGENT, MEMBER, context) == "allowed") is allowed, (role.logical_id, context)
    # Without such a team there is nothing to deny.
    assert DeployedStage("test", before).role("compute", "InstanceRole").decide_in(AGENT, MEMBER, of_team) == "allowed"
    profiles = resources(after["compute"], "AWS::IAM::InstanceProfile")
    for name, item in all_environments(after["compute"]).items():
        profile = profiles[item["ComputeResources"]["InstanceRole"]["Fn::GetAtt"][0]]
        assert profile["Roles"] == [{"Ref": (own if "-of-health" in name else shared).logical_id}]


def _groups_of_environment(compute: dict[str, Any], name: str) -> list[Any]:
    interfaces = launch_data(compute, name).get("NetworkInterfaces", [])
    given = all_environments(compute)[name]["ComputeResources"].get("SecurityGroupIds", [])
    return [*given, *(group for card in interfaces for group in card["Groups"])]


def _parameter(template: dict[str, Any], name: str) -> str:
    (found,) = (key for key, value in template["Parameters"].items() if value.get("Default") == name)
    return str(found)


def _value(template: dict[str, Any], name: str) -> Any:
    (found,) = (item["Value"] for item in resources(template, "AWS::SSM::Parameter").values() if item["Name"] == name)
    return found


def _groups_of(template: dict[str, Any], resource_type: str) -> list[Any]:
    return [group for item in resources(template, resource_type).values() for group in item.get("SecurityGroupIds", [])]
