"""A team's own instances: no other team's jobs come to them, no other's instances reach them."""

import json
from dataclasses import replace
from typing import Any

import pytest

from infra.stages import Stage, Team
from tests.support.infra.deployed_roles import ACCOUNT, REGION, DeployedStage
from tests.support.infra.instances import GAUDI, all_environments, boot_parts, launch_data, queue_environments, queues
from tests.support.infra.synthesis import Templates, resources, stacks_of

STAGE = Stage(
    name="test",
    region="us-east-1",
    max_on_demand_nodes=2,
    max_multinode_nodes=2,
    fsx_gib=1_200,
    interface_endpoints=True,
    teams=(Team(name="health"), Team(name="product", shares_instances=True)),
)
MEMBER = f"arn:aws:ecs:{REGION}:{ACCOUNT}:container-instance/AWSBatch-x/0f0f"


@pytest.fixture(scope="module")
def made() -> Templates:
    return stacks_of(STAGE)


@pytest.fixture(scope="module")
def compute(made: Templates) -> dict[str, Any]:
    return made["compute"]


def test_a_team_has_queues_and_instances_to_itself(compute: dict[str, Any]) -> None:
    used = [
        {item for name in queues(compute, team) for item in queue_environments(compute, name, team)}
        for team in ("health", None)
    ]
    assert used[0] == {name for name in all_environments(compute) if "-of-health-" in name}
    assert used[0] | used[1] == all_environments(compute).keys()
    assert not used[0] & used[1]
    assert queue_environments(compute, "spot", "health") == [f"{GAUDI}-of-health-spot", f"{GAUDI}-of-health-on-demand"]
    templates = [
        item["ComputeResources"]["LaunchTemplate"]["LaunchTemplateId"]["Ref"]
        for item in all_environments(compute).values()
    ]
    assert len(set(templates)) == len(templates) == STAGE.queue_count == 8


def test_sharing_changes_nothing_for_the_teams_that_share_already(compute: dict[str, Any]) -> None:
    # A new logical id, or another name of an instance, would end what waits and runs.
    sharing = tuple(replace(team, shares_instances=True) for team in STAGE.teams)
    before = stacks_of(replace(STAGE, teams=sharing))["compute"]["Resources"]
    after = compute["Resources"]
    changed = [name for name, item in before.items() if after[name].get("Properties") != item.get("Properties")]
    # The one thing that changes: instances that teams share are denied to speak as one of that team's.
    assert [before[name]["Type"] for name in changed] == ["AWS::IAM::Policy"]
    assert "InstancesOfOtherTeams" in json.dumps(after[changed[0]])
    assert not [name for name in after.keys() - before.keys() if "health" not in name]


def test_its_security_group_admits_its_own_members_and_nobody_else(made: Templates, compute: dict[str, Any]) -> None:
    ((group, properties),) = resources(compute, "AWS::EC2::SecurityGroup").items()
    own = {"Fn::GetAtt": [group, "GroupId"]}
    assert "SecurityGroupIngress" not in properties
    for name, item in all_environments(compute).items():
        interfaces = launch_data(compute, name).get("NetworkInterfaces", [])
        groups = [
            *item["ComputeResources"].get("SecurityGroupIds", []),
            *(g for card in interfaces for g in card["Groups"]),
        ]
        assert groups
        assert all((group == own) is ("-of-health" in name) for group in groups), name
    rules = list(resources(compute, "AWS::EC2::SecurityGroupIngress").values())
    servers, endpoints = (
        {"Ref": next(key for key, value in compute["Parameters"].items() if value.get("Default") == name)}
        for name in ("/trainyard/test/security-group/fsx", "/trainyard/test/security-group/endpoints")
    )
    let_in = [rule["SourceSecurityGroupId"] for rule in rules if rule["GroupId"] == own]
    assert own in let_in, "ranks of one job reach each other"
    assert [source for source in let_in if source not in (own, servers)] == []
    # It reaches what instances have to: AWS through the stage's endpoints, and file servers.
    admitted = [(rule["GroupId"], rule["FromPort"]) for rule in rules if rule["GroupId"] in (servers, endpoints)]
    assert admitted == [(endpoints, 443), (servers, 988), (servers, 1018)]


def test_the_group_of_file_servers_outlives_them_as_rules_of_teams_may_name_it(made: Templates) -> None:
    # The storage stack is deployed first: EC2 would refuse to delete a group that rules of the compute stack name.
    without = stacks_of(replace(STAGE, fsx_gib=0))
    (group,) = (name for name in resources(made["storage"], "AWS::EC2::SecurityGroup"))
    assert without["storage"]["Resources"][group] == made["storage"]["Resources"][group]
    assert resources(without["storage"], "AWS::FSx::FileSystem") == {}
    assert "/trainyard/test/security-group/fsx" not in json.dumps(without["compute"])


def test_its_instances_name_the_team_from_the_start(compute: dict[str, Any]) -> None:
    for name, item in all_environments(compute).items():
        team = "health" if "-of-health" in name else None
        tags = item["ComputeResources"]["Tags"]
        # Trap: watch_instances tells environments apart by their instances' names.
        assert tags["Name"] == f"trainyard-test-compute-{name}"
        assert tags.get("trainyard:team") == item["Tags"].get("trainyard:team") == team
        scripts = "\n".join(text for _, text in boot_parts(launch_data(compute, name)))
        tag = 'ECS_CONTAINER_INSTANCE_TAGS={"trainyard:team":"health"}'
        assert (tag in scripts.splitlines()) is (team is not None)


def test_keys_of_an_instance_are_no_use_against_another_teams_instances(made: Templates) -> None:
    stage = DeployedStage("test", made)
    shared, own = stage.role("compute", "InstanceRole"), stage.role("compute", "isolatedhealthInstanceRole")
    for role, team, allowed in (
        (shared, None, True),
        (shared, "health", False),
        (own, "health", True),
        (own, None, True),  # before it has tagged itself
        (own, "finance", False),
    ):
        context = {"aws:ResourceTag/trainyard:team": team} if team else {}
        assert (role.decide_in("ecs:Poll", MEMBER, context) == "allowed") is allowed, (role.logical_id, team)
    profiles = resources(made["compute"], "AWS::IAM::InstanceProfile")
    for name, item in all_environments(made["compute"]).items():
        profile = profiles[item["ComputeResources"]["InstanceRole"]["Fn::GetAtt"][0]]
        assert profile["Roles"] == [{"Ref": (own if "-of-health" in name else shared).logical_id}]
