import re

from jobs.contract.queues import QUEUES
from tests.support.infra.synthesis import ROOT, Templates

README = (ROOT / "infra" / "README.md").read_text()


def test_the_picture_names_every_stack_and_every_queue(variants: Templates) -> None:
    (picture,) = re.findall(r"^```mermaid\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    names = set(re.findall(r"[a-z]+(?:-[a-z]+)*", picture))
    # Of a stage that has everything that can be asked for.
    stacks = {path.split("/")[1] for path in variants if path.startswith("all/")}
    assert stacks | QUEUES.keys() <= names


def test_actions_of_the_workflow_are_named_by_their_commit() -> None:
    used = re.findall(r"uses: (\S+)", README)
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action)] == []
