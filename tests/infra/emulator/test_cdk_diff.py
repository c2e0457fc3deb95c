"""What `cdk diff` of the real CLI shows of the project's own stages: it asks for a change set and never executes it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from infra.emulator import cdk_cli
from infra.settings import STAGES
from tests.support.embedded_aws import EmbeddedAws
from tests.support.infra.synthesis import synthesise_as_the_cli_does

pytestmark = pytest.mark.timeout(300)  # the first waits for the stage to be deployed

Diff = Callable[..., tuple[int, str]]

NODES = STAGES["dev"].max_nodes + 2


@pytest.fixture
def diff(deployed_aws: EmbeddedAws, tmp_path: Path) -> Diff:
    """Runs it on the project's app, or on one whose stage `dev` may have other nodes; exit code and output."""

    def run(*arguments: str, max_nodes: int | None = None) -> tuple[int, str]:
        app = cdk_cli.APP
        if max_nodes is not None:
            app = synthesise_as_the_cli_does(replace(STAGES["dev"], max_nodes=max_nodes), tmp_path / "assembly")
        output = ["--output", str(tmp_path / "cdk.out")]
        return deployed_aws.cdk("diff", *arguments, "--app", app, *output, scratch=tmp_path, cwd=cdk_cli.ROOT)

    return run


def shown(said: str) -> list[str]:
    """The lines that tell of a difference, without the tree they hang on."""
    bare = [line.strip(" │└├─") for line in said.splitlines()]
    return [line for line in bare if line.startswith(("[~]", "[+]", "[-]"))]


def test_one_changed_limit_is_all_that_is_shown(diff: Diff) -> None:
    code, said = diff("dev/*", "--fail", max_nodes=NODES)

    vcpus = STAGES["dev"].row.vcpus
    assert code == 1, said
    assert "Number of stacks with differences: 1" in said
    lines = shown(said)
    environments = [line for line in lines if line.startswith("[~] AWS::Batch::ComputeEnvironment compute/")]
    assert len(environments) == len(STAGES["dev"].teams)
    assert not any("replace" in line for line in environments)
    assert [line for line in lines if line not in environments] == len(environments) * [
        "[~] ComputeResources",
        "[~] .MaxvCpus:",
        f"[-] {STAGES['dev'].max_nodes * vcpus}",
        f"[+] {NODES * vcpus}",
    ]


def test_no_difference_is_no_failure(diff: Diff) -> None:
    code, said = diff("dev/compute", "--exclusively", "--fail", max_nodes=STAGES["dev"].max_nodes)
    assert (code, shown(said)) == (0, []), said
    assert "Number of stacks with differences: 0" in said


def test_a_new_stack_is_shown_whole_and_not_left_behind(diff: Diff, deployed_aws: EmbeddedAws) -> None:
    code, said = diff("prod/access", "--exclusively", "--context", "stage=prod")

    assert code == 0, said
    assert "read-only change set" in said
    assert "Could not create a change set" not in said
    assert any(line.startswith("[+] AWS::IAM::ManagedPolicy access/Boundary") for line in shown(said))
    stacks = deployed_aws.client("cloudformation").describe_stacks()["Stacks"]
    assert "trainyard-prod-access" not in {stack["StackName"] for stack in stacks}
