import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from infra.settings import STAGES
from tests.support.infra.synthesis import ROOT, Templates, imports

STACKS = ("access", "network", "storage", "image", "machine-image", "compute", "jobs", "observability")


def test_each_stage_has_its_stacks_and_protects_them_if_set(assembly: Path, templates: Templates) -> None:
    assert set(templates) == {f"{stage}/{stack}" for stage in STAGES for stack in STACKS}
    stacks = _artifacts(assembly)
    names = {item["properties"]["stackName"]: item["properties"] for item in stacks.values()}
    assert set(names) == {f"trainyard-{stage}-{stack}" for stage in STAGES for stack in STACKS}
    # An unprotected stack would be deleted, with its running jobs, before CloudFormation refuses the next one.
    protected = {name for name, properties in names.items() if properties.get("terminationProtection")}
    assert protected == {f"trainyard-prod-{stack}" for stack in STACKS}


def test_stacks_depend_on_the_stacks_whose_values_they_read(assembly: Path, templates: Templates) -> None:
    # Otherwise CloudFormation would refuse the order of deployments and, worse, of deletions.
    by_id = _artifacts(assembly)

    def dependencies(artifact: dict[str, Any]) -> set[str]:
        """Return the names of stacks before this one; the CDK omits indirect dependencies."""
        before = [by_id[name] for name in artifact.get("dependencies", []) if name in by_id]
        return {str(item["properties"]["stackName"]) for item in before}.union(*map(dependencies, before))

    for artifact in by_id.values():
        path = artifact["displayName"].split(" ")[0]
        assert {name.split(":")[0] for name in imports(templates[path])} <= dependencies(artifact)
        # Nothing costs money before the first stack has asked EC2 for the instance types.
        assert path.endswith("/access") or f"trainyard-{path.split('/')[0]}-access" in dependencies(artifact)
        if path.endswith("/compute"):
            assert f"trainyard-{path.split('/')[0]}-machine-image" in dependencies(artifact)
    assert any(imports(template) for template in templates.values())


def test_synthesis_needs_no_lookups_and_uses_the_bootstrap(
    assembly: Path, templates: Templates, variants: Templates
) -> None:
    manifests = [json.loads(path.read_text()) for path in assembly.rglob("manifest.json")]
    assert len(manifests) == 1 + len(STAGES)
    assert not any(manifest.get("missing") for manifest in manifests)
    environments = {artifact["environment"] for artifact in _artifacts(assembly).values()}
    assert environments == {f"aws://unknown-account/{row.region or 'unknown-region'}" for row in STAGES.values()}
    for path, template in {**templates, **variants}.items():
        qualifier = "closed1" if path.startswith("closed/") else "hnb659fds"
        assert template["Parameters"]["BootstrapVersion"]["Default"] == f"/cdk-bootstrap/{qualifier}/version"


def test_the_command_in_cdk_json_runs_without_credentials(tmp_path: Path) -> None:
    # GIVEN neither credentials nor configuration nor an activated environment
    configuration = json.loads((ROOT / "cdk.json").read_text())
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "CDK_", "PYTHON", "VIRTUAL_ENV"))
    }
    # WHEN the CLI starts the app with the command in cdk.json, for one stage
    done = subprocess.run(
        ["sh", "-c", configuration["app"]],
        cwd=ROOT,
        env={
            **inherited,
            # If the project's environment is not at its usual path, use the active one.
            "PATH": f"{Path(sys.executable).parent}:{inherited['PATH']}",
            "CDK_OUTDIR": str(tmp_path / "out"),
            "CDK_CONTEXT_JSON": json.dumps({**configuration["context"], "stage": "dev"}),
            **dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), str(tmp_path / "nothing")),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # THEN only that stage is synthesised
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.glob("out/assembly-*")] == ["assembly-dev"]


def _artifacts(assembly: Path) -> dict[str, dict[str, Any]]:
    """Return the stacks of an assembly from its manifests."""
    return {
        name: artifact
        for path in assembly.glob("assembly-*/manifest.json")
        for name, artifact in json.loads(path.read_text())["artifacts"].items()
        if artifact["type"] == "aws:cloudformation:stack" and "stackName" in artifact["properties"]
    }
