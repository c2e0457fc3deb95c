"""What a notebook asks for: one process on one node, with all its cards."""

from dataclasses import replace

import pytest

from jobs.contract.catalog import CATALOG
from jobs.contract.errors import UsageError
from jobs.contract.image_hierarchy import child_name, images
from jobs.contract.instance_types import INSTANCE_TYPES
from jobs.contract.plan import plan
from jobs.contract.spec import JobSpec, parse_spec
from tests.support.jobs.planning import EMBEDDED, LARGE, RUN_ID, STAGE, command_of, environment_of


def notebook(**changed: object) -> JobSpec:
    return parse_spec({"name": "notebook", "job": "notebook", **changed}, origin="a.yaml")


def test_one_process_gets_all_cards_of_one_node() -> None:
    planned = plan(notebook(), STAGE, run_id=RUN_ID)
    assert planned.request["jobDefinition"] == "arn:definition/notebook:1"
    assert planned.request["jobQueue"] == "arn:queue/gaudi"
    assert command_of(planned)[3:] == [
        "--instance-type=dl1.24xlarge",
        "--nproc-per-node=1",
        "--capacity=spot",
        "notebook",
        "--tensorboard-logdir=.",
        "--idle-timeout-hours=2.0",
    ]
    assert environment_of(planned)["TRAINYARD_ACCELERATOR"] == "hpu"
    # All cards are its own: nothing to say of cards that nobody uses.
    assert planned.notes == ()
    assert plan(notebook(), EMBEDDED, run_id=RUN_ID).nproc_per_node == 1


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        (
            {"nproc_per_node": 8},
            r"^resources.nproc_per_node: a 'notebook' is one process, to which all HPUs of the node",
        ),
        (
            {"nnodes": 2},
            r"^resources.nnodes: a 'notebook' runs on one node, not on 2\nNext: leave resources.nnodes out$",
        ),
    ],
)
def test_ranks_and_nodes_are_refused(resources: dict[str, int], message: str) -> None:
    stage = replace(LARGE, job_definitions=STAGE.job_definitions)
    with pytest.raises(UsageError, match=message):
        plan(notebook(resources=resources), stage, run_id=RUN_ID)
    assert plan(notebook(resources={"nproc_per_node": 1}), stage, run_id=RUN_ID).nproc_per_node == 1


def test_its_files_are_a_folder_wherever_data_lies() -> None:
    planned = plan(notebook(arguments={"files": "data://research/earlier/"}), STAGE, run_id=RUN_ID)
    assert "--files=s3://data-bucket/research/earlier/" in command_of(planned)
    with pytest.raises(UsageError, match=r"^a\.yaml: arguments\.files: hf://org/name: a folder is read from s3://"):
        notebook(arguments={"files": "hf://org/name"})


@pytest.mark.parametrize("logdir", ["/", "/etc", "../x", "a/../../x", "data://x", "hf://x", "file:///etc"])
def test_where_tensorboard_may_not_look(logdir: str) -> None:
    with pytest.raises(UsageError, match=r"^a\.yaml: arguments\.tensorboard_logdir: '.*' is neither a folder below"):
        notebook(arguments={"tensorboard_logdir": logdir})


@pytest.mark.parametrize("hours", [0, -1])
def test_it_ends_some_time_when_nobody_works_in_it(hours: float) -> None:
    with pytest.raises(UsageError, match=r"^a\.yaml: arguments\.idle_timeout_hours: "):
        notebook(arguments={"idle_timeout_hours": hours})


def test_each_row_has_an_image_for_each_kind() -> None:
    names = {child_name(row.image, kind.image) for row in INSTANCE_TYPES.values() for kind in CATALOG.values()}
    assert names <= images().keys()
    assert "gaudi-notebook" in names
