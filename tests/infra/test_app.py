import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest
from aws_cdk import aws_s3 as s3

import infra.app
from infra.settings import STAGES, TEAMS
from infra.stages import Stage
from tests.support.infra.synthesis import ROOT, Templates, new_app, templates_of

STACKS = ("access", "network", "storage", "image", "machine-image", "compute", "jobs", "observability")


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


def test_what_the_rules_forbid_is_not_synthesised(tmp_path: Path) -> None:
    # GIVEN a stack with a bucket that lacks everything
    app = new_app(tmp_path)
    infra.app.build(app, [])
    s3.Bucket(cdk.Stack(cdk.Stage(app, "test"), "careless"), "Bucket")
    # WHEN the app is synthesised, THEN cdk-nag stops it
    with pytest.raises(RuntimeError, match="S3 Bucket has server access logs disabled"):
        app.synth()


@pytest.mark.parametrize(
    ("changed", "stack", "paths"),
    [
        ({"max_nodes": 7}, "compute", {"ComputeResources.MaxvCpus"}),
        (
            {"checkpoint_retention_days": 7},
            "storage",
            {f"LifecycleConfiguration.Rules.{rule}.ExpirationInDays" for rule in (1, 2)},
        ),
    ],
)
def test_a_setting_changes_what_it_names_and_nothing_else(changed: dict[str, Any], stack: str, paths: set[str]) -> None:
    row = Stage(name="test", teams=TEAMS)
    before, after = templates_of(row), templates_of(replace(row, **changed))
    found = {path: _differences(before[path]["Resources"], after[path]["Resources"]) for path in before}
    assert {path for path, differences in found.items() if differences} == {f"test/{stack}"}
    assert {path.partition(".Properties.")[2] for path in found[f"test/{stack}"]} == paths


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
