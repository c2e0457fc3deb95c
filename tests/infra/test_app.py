import json
import os
import re
import subprocess
import sys
import tarfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest
from aws_cdk import aws_s3 as s3

import infra.app
from infra.settings import STAGES, TEAMS
from infra.stages import Stage, Team
from tests.support.infra.synthesis import ROOT, Templates, new_app, synthesise, templates_of

SHARING = tuple(replace(team, shares_instances=True) for team in TEAMS)

STACKS = ("access", "network", "storage", "image", "machine-image", "compute", "jobs", "observability")

DEVIATIONS = {
    # "weak" would let the data bucket's stack be deleted while jobs still name the bucket, and needs an intrinsic
    # function (Fn::GetStackOutput) that neither older tools nor the embedded AWS know.
    "@aws-cdk/core:defaultCrossStackReferences": "strong",
    # DL1 is in the standard partition only.
    "@aws-cdk/core:target-partitions": ["aws"],
}


def test_each_stage_has_its_stacks_by_their_names(assembly: Path, templates: Templates) -> None:
    assert set(templates) == {f"{stage}/{stack}" for stage in STAGES for stack in STACKS}
    names = {
        artifact["properties"]["stackName"]
        for artifact in _artifacts(assembly, "aws:cloudformation:stack")
        if "stackName" in artifact["properties"]
    }
    assert names == {f"trainyard-{stage}-{stack}" for stage in STAGES for stack in STACKS}


def test_stacks_wait_for_those_whose_values_they_import(assembly: Path, templates: Templates) -> None:
    # Without it they are deployed, and worse, destroyed, in an order that CloudFormation refuses.
    stacks = _artifacts(assembly, "aws:cloudformation:stack")
    by_id = {
        name: artifact
        for path in assembly.glob("assembly-*/manifest.json")
        for name, artifact in json.loads(path.read_text())["artifacts"].items()
    }

    def waited_for(artifact: dict[str, Any]) -> set[str]:
        """Names of the stacks that come before; the CDK leaves out those that another one waits for."""
        before = [by_id[name] for name in artifact.get("dependencies", [])]
        return {str(item["properties"].get("stackName")) for item in before}.union(*map(waited_for, before))

    for artifact in stacks:
        template = templates[artifact["displayName"].split(" ")[0]]
        imported = {name.split(":")[0] for name in _imports(template)}
        assert imported <= waited_for(artifact)
    assert any(_imports(template) for template in templates.values())


def test_a_stage_is_deployed_through_the_bootstrap_that_it_names(templates: Templates, variants: Templates) -> None:
    for path, template in {**templates, **variants}.items():
        qualifier = "closed1" if path.startswith("closed/") else "hnb659fds"
        assert template["Parameters"]["BootstrapVersion"]["Default"] == f"/cdk-bootstrap/{qualifier}/version"


def test_synthesis_looks_nothing_up(assembly: Path) -> None:
    manifests = [json.loads(path.read_text()) for path in assembly.rglob("manifest.json")]
    assert len(manifests) == 1 + len(STAGES)
    assert not any(manifest.get("missing") for manifest in manifests)
    environments = {artifact["environment"] for artifact in _artifacts(assembly, "aws:cloudformation:stack")}
    assert environments == {f"aws://unknown-account/{row.region or 'unknown-region'}" for row in STAGES.values()}


def test_a_stage_of_a_fixed_account_looks_nothing_up_either(tmp_path: Path) -> None:
    # Trap: with a fixed environment ec2.Vpc asks the account for its zones.
    row = Stage(name="test", teams=TEAMS, account="123456789012", region="us-west-2")
    synthesise([row], tmp_path)
    assert not any(json.loads(path.read_text()).get("missing") for path in tmp_path.rglob("manifest.json"))
    environments = {artifact["environment"] for artifact in _artifacts(tmp_path, "aws:cloudformation:stack")}
    assert environments == {"aws://123456789012/us-west-2"}


def test_the_app_runs_as_cdk_json_says_without_credentials(tmp_path: Path) -> None:
    # GIVEN neither credentials nor configuration nor an activated environment
    nothing = str(tmp_path / "nothing")
    # WHEN the CLI starts the app as cdk.json says, for one stage
    done = _run_app(tmp_path, stage="dev", AWS_CONFIG_FILE=nothing, AWS_SHARED_CREDENTIALS_FILE=nothing)
    # THEN that stage is synthesised, and it alone
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.glob("out/assembly-*")] == ["assembly-dev"]


def test_a_stage_that_does_not_exist_is_refused_without_a_traceback(tmp_path: Path) -> None:
    done = _run_app(tmp_path, stage="prd")
    assert done.returncode == 3
    message = "\n".join(line for line in done.stderr.splitlines() if line and "!!" not in line)
    assert message == (
        "error: stage 'prd' is not in infra/settings.py; did you mean 'prod'?\n"
        "Next: name one that is there, or add a row"
    )


def test_feature_flags_are_those_that_this_cdk_recommends() -> None:
    archive = Path(cdk.__file__).parent / "_jsii" / f"aws-cdk-lib@{version('aws-cdk-lib')}.jsii.tgz"
    with tarfile.open(archive) as files:
        member = files.extractfile("package/recommended-feature-flags.json")
        assert member is not None
        recommended = json.load(member)
    assert json.loads((ROOT / "cdk.json").read_text())["context"] == {**recommended, **DEVIATIONS}
    assert all(recommended[flag] != value for flag, value in DEVIATIONS.items())


def test_what_the_rules_forbid_is_not_synthesised(tmp_path: Path) -> None:
    # GIVEN a stack with a bucket that lacks everything
    app = new_app(tmp_path)
    infra.app.build(app, [])
    s3.Bucket(cdk.Stack(cdk.Stage(app, "test"), "careless"), "Bucket")
    # WHEN the app is synthesised, THEN cdk-nag stops it
    with pytest.raises(RuntimeError, match="S3 Bucket has server access logs disabled"):
        app.synth()


def test_stages_differ_by_their_names_only_where_their_settings_are_equal() -> None:
    alpha, omega = (templates_of(Stage(name=name, teams=TEAMS)) for name in ("alpha", "omega"))
    assert {
        path.replace("alpha", "omega"): _renamed(template, "alpha", "omega") for path, template in alpha.items()
    } == {path: _renamed(template, "omega", "omega") for path, template in omega.items()}


@pytest.mark.parametrize(
    ("changed", "stacks", "paths"),
    [
        ({"max_nodes": 7}, {"compute"}, {"dl124xlarge1210spot65D0EA09.Properties.ComputeResources.MaxvCpus"}),
        (
            {"log_retention_days": 30},
            {"network", "image", "machine-image", "compute", "jobs", "observability"},
            {
                f"{log}.Properties.RetentionInDays"
                for log in (
                    "BuildLogs04E75593",
                    "DefaultGroupHandlerLogs0805A114",
                    "EndSweepLog474765FA",
                    "FlowLogs16C1943A",
                    "InstanceLogsAB47D8DA",
                    "JobLogs4F84869B",
                    "OfferFunctionLog2E44E9D2",
                    "Pooldl124xlarge1210LogsD54D737A",
                    "ReportJobLog49D1CE91",
                    "TagInstancesLogDC543DC6",
                    "WatchInstancesLogFD016321",
                )
            },
        ),
        (
            {"teams": (replace(SHARING[0], share=4.0), SHARING[1])},
            {"compute"},
            {"TeamShares.Properties.FairsharePolicy.ShareDistribution.0.WeightFactor"},
        ),
        (
            {"checkpoint_retention_days": 7},
            {"storage"},
            {f"RunsE45A2291.Properties.LifecycleConfiguration.Rules.{rule}.ExpirationInDays" for rule in (1, 2)},
        ),
        ({"termination_protection": True}, set(), set()),
    ],
    ids=["limit", "retention", "share", "checkpoints", "protection"],
)
def test_a_setting_changes_what_it_names_and_nothing_else(
    changed: dict[str, Any], stacks: set[str], paths: set[str]
) -> None:
    row = Stage(name="test", teams=SHARING)
    before = templates_of(row)
    after = templates_of(replace(row, **changed))
    assert {path.split("/")[1] for path in before if before[path] != after[path]} == stacks
    assert {
        difference
        for path in before
        for difference in _differences(before[path]["Resources"], after[path]["Resources"])
    } == paths


def test_a_new_team_adds_and_changes_nothing_of_the_others() -> None:
    row = Stage(name="test", teams=TEAMS)
    before = templates_of(row)
    after = templates_of(replace(row, teams=(*TEAMS, Team(name="vision"))))
    assert {path.split("/")[1] for path in before if before[path] != after[path]} == {
        *("compute", "jobs"),
        "observability",  # whose alarms and rules hear of the new queues
    }
    old, new = before["test/jobs"]["Resources"], after["test/jobs"]["Resources"]
    assert {name: new[name] for name in old} == old
    assert all("vision" in name for name in new.keys() - old.keys())


def test_every_stack_is_protected_where_the_stage_says_so(assembly: Path) -> None:
    # One that is not is deleted before the first refusal, with the jobs that run in it.
    protected = {
        artifact["properties"]["stackName"]
        for artifact in _artifacts(assembly, "aws:cloudformation:stack")
        if artifact["properties"].get("terminationProtection")
    }
    assert protected == {f"trainyard-prod-{stack}" for stack in STACKS}


def _run_app(tmp_path: Path, *, stage: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Do what the CDK CLI does with cdk.json's `app`, given `-c stage=…`."""
    configuration = json.loads((ROOT / "cdk.json").read_text())
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "CDK_", "PYTHON", "VIRTUAL_ENV"))
    }
    # Where the project's own environment is not at its usual place, the active one must do.
    path = f"{Path(sys.executable).parent}:{inherited['PATH']}"
    return subprocess.run(
        ["sh", "-c", configuration["app"]],
        cwd=ROOT,
        env={
            **inherited,
            "PATH": path,
            "CDK_OUTDIR": str(tmp_path / "out"),
            "CDK_CONTEXT_JSON": json.dumps({**configuration["context"], "stage": stage}),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _artifacts(assembly: Path, kind: str) -> list[dict[str, Any]]:
    return [
        artifact
        for path in assembly.glob("assembly-*/manifest.json")
        for artifact in json.loads(path.read_text())["artifacts"].values()
        if artifact["type"] == kind
    ]


def _imports(value: Any) -> set[str]:
    """Names of all exports that a template imports."""
    if isinstance(value, dict):
        direct = {str(value["Fn::ImportValue"])} if "Fn::ImportValue" in value else set()
        return direct.union(*(_imports(item) for item in value.values()))
    if isinstance(value, list):
        return set().union(*(_imports(item) for item in value))
    return set()


def _renamed(template: dict[str, Any], old: str, new: str) -> Any:
    # The CDK adds a hash to names that it makes of a whole path, the stage's name in it.
    text = json.dumps(template).replace(old, new)
    return json.loads(re.sub(rf"({new}observability\w*?)[0-9A-F]{{8,}}(?=\W)", r"\1", text))


def _differences(before: Any, after: Any, path: str = "") -> set[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        return {
            found
            for key in before.keys() | after.keys()
            for found in _differences(before.get(key), after.get(key), f"{path}.{key}".lstrip("."))
        }
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return {
            found
            for index, (left, right) in enumerate(zip(before, after, strict=True))
            for found in _differences(left, right, f"{path}.{index}")
        }
    return set() if before == after else {path}
