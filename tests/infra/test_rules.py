import copy
from collections import defaultdict
from pathlib import Path

import aws_cdk as cdk
import pytest
from aws_cdk import aws_batch as batch

import infra.app
from infra.constructs.stage_stack import acknowledge
from infra.rules import RULES
from infra.rules.stage_templates import StageTemplates
from infra.settings import STAGES
from tests.support.infra.breaking import BREAKS, Break
from tests.support.infra.breaking_job_definitions import JOB_DEFINITION_BREAKS
from tests.support.infra.synthesis import Templates, new_app
from tests.support.infra.variants import VARIANTS

ALL_BREAKS = [*BREAKS, *JOB_DEFINITION_BREAKS]


@pytest.mark.parametrize("stage", [*STAGES, *(row.name for row in VARIANTS)])
def test_what_the_app_synthesises_keeps_every_rule(stage: str, templates: Templates, variants: Templates) -> None:
    assert broken_rules(_of_stage({**templates, **variants}, stage)) == {}


@pytest.mark.parametrize("broken", ALL_BREAKS, ids=lambda item: f"{item.rule.removeprefix('TY-')}: {item.what}")
def test_a_rule_finds_what_it_is_there_for(broken: Break, variants: Templates) -> None:
    # GIVEN the real templates WHEN one thing in them goes wrong
    templates = copy.deepcopy(_of_stage(variants, broken.variant))
    broken.apply(templates)
    # THEN its rule says so, and names a resource of the very templates
    findings = broken_rules(templates)
    assert broken.rule in findings
    assert all(found.split(" ")[1] in templates[found.split(" ")[0]]["Resources"] for found in findings[broken.rule])


def test_every_rule_has_something_that_breaks_it() -> None:
    assert {rule.id for rule in RULES} == {item.rule for item in ALL_BREAKS}


def test_rules_say_why_and_what_next() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert len(rule.reason.split()) >= 8, rule.id
        assert rule.source, rule.id
        assert rule.next_step, rule.id


def test_synthesis_stops_where_a_rule_is_broken_and_says_where_why_and_what_next(tmp_path: Path) -> None:
    # GIVEN a compute environment that keeps instances running
    app = new_app(tmp_path)
    infra.app.build(app, [])
    _idle_environment(app)
    # WHEN the app is synthesised, THEN it is refused
    with pytest.raises(RuntimeError) as refused:
        app.synth()
    said = str(refused.value)
    assert "TY-ComputeEnvironment-NothingIdle" in said
    assert "test/careless/Idle" in said
    assert "instances run, and are paid for, while no job does" in said
    assert "set minvCpus to 0" in said


def test_a_rule_can_be_acknowledged_with_a_reason(tmp_path: Path) -> None:
    app = new_app(tmp_path)
    infra.app.build(app, [])
    environment = _idle_environment(app)
    acknowledge(
        environment, "one instance stays warm for a live demonstration", "trainyard::TY-ComputeEnvironment-NothingIdle"
    )
    app.synth()


def broken_rules(templates: Templates) -> dict[str, list[str]]:
    """Return, by rule, `<stack> <logical id> <location>` of what it finds in the templates of a stage."""
    stage = StageTemplates(templates)
    findings: dict[str, list[str]] = defaultdict(list)
    for rule in RULES:
        for finding in rule.find(stage):
            findings[rule.id].append(f"{finding.resource.stack} {finding.resource.logical_id} {finding.location}")
    return dict(findings)


def _of_stage(templates: Templates, stage: str) -> Templates:
    chosen = {path: template for path, template in templates.items() if path.split("/")[0] == stage}
    assert chosen
    return chosen


def _idle_environment(app: cdk.App) -> batch.CfnComputeEnvironment:
    resources = batch.CfnComputeEnvironment.ComputeResourcesProperty(
        type="EC2",
        allocation_strategy="BEST_FIT_PROGRESSIVE",
        instance_types=["m6i.4xlarge"],
        minv_cpus=16,
        maxv_cpus=16,
        subnets=["subnet-0123456789abcdef0"],
        security_group_ids=["sg-0123456789abcdef0"],
        ec2_configuration=[batch.CfnComputeEnvironment.Ec2ConfigurationObjectProperty(image_type="ECS_AL2023")],
        tags={"trainyard:project": "trainyard", "trainyard:stage": "test"},
    )
    return batch.CfnComputeEnvironment(
        cdk.Stack(cdk.Stage(app, "test"), "careless"),
        "Idle",
        type="MANAGED",
        replace_compute_environment=False,
        compute_resources=resources,
    )
