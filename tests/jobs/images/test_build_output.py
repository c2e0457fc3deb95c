"""On what Docker's engine 20.10 and its command really printed: tests/jobs/images/build_output/.

The transcripts whose names begin with buildx are put together from BuildKit's own format of its progress and buildx'
lines around it; no buildx printed them.
"""

from pathlib import Path

import pytest

from jobs.images import engine
from jobs.images.build_output import BuildOutput, Vertex

RECORDED = Path(__file__).parent / "build_output"

ONE_STAGE = "ARG BASE_IMAGE=x\nFROM ${BASE_IMAGE}\nRUN a\n"
TWO_STAGES = "FROM ${PARENT_IMAGE} AS packages\nRUN a\nFROM ${PARENT_IMAGE}\nCOPY --from=packages /a /a\n"


def read(name: str, dockerfile: str = ONE_STAGE) -> tuple[BuildOutput, list[Vertex]]:
    output = BuildOutput(dockerfile)
    lines = (RECORDED / f"{name}.txt").read_text().splitlines(keepends=True)
    events = [vertex for line in lines if (vertex := output.feed(line))]
    return output, events


def test_steps_and_how_they_ended() -> None:
    output, events = read("cpu_after_edit")
    assert {step.number: step.is_cached for step in output.layers} == {
        **dict.fromkeys((2, 3, 4), True),
        **dict.fromkeys((5, 6, 7), False),
    }
    assert all(step.is_done for step in output.steps)
    assert output.failed is None
    assert {step.number: step.seconds for step in output.steps}[6] == 2.6
    begun = [vertex.number for vertex in events if vertex.number]
    assert begun == [number for number in range(1, 8) for _ in ("begins", "ends")]


def test_progress_is_a_line_when_a_step_begins_and_one_when_there_is_more_to_report() -> None:
    output = BuildOutput(ONE_STAGE)
    told = ("#4 [internal] load build context", "#5 [2/3] RUN --network=none a", "#5 CACHED", "#6 [3/3] RUN b")
    vertices = [output.feed(line) for line in told]
    lines = [vertex.progress for vertex in vertices[:3:2] if vertex]
    assert lines == ["", "2/3 cached"]
    began, *_ = [vertex for vertex in vertices if vertex and not vertex.is_done and vertex.number]
    assert began.progress == "3/3 RUN b"
    for end, reported in (("0.4", ""), ("12.5", "3/3 12.5 s")):
        began.is_done, began.seconds = True, float(end)
        assert began.progress == reported
    began.error = "exit code: 1"
    assert began.progress == ""


def test_an_instruction_is_shown_without_its_flags() -> None:
    output, _ = read("cpu_after_edit")
    packages, code, install = [step.summary for step in output.steps][3:6]
    assert packages.startswith("RUN /mnt/install-packages /opt/trainyard/requirements.txt torch ")
    assert (code, install) == ("COPY jobs /opt/trainyard/jobs", "RUN /mnt/install-jobs")
    assert output.steps[1].summary.startswith("RUN useradd --uid 1000 ")  # these are the program's


def test_an_images_layers_are_those_of_its_last_stage() -> None:
    output, _ = read("cpu_ray", TWO_STAGES)
    assert [step.place for step in output.steps] == ["packages 1/3", "packages 2/3", "packages 3/3", "stage-1 2/2"]
    assert [step.place for step in output.layers] == ["stage-1 2/2"]
    named, _ = read("cpu_ray", TWO_STAGES.replace("FROM ${PARENT_IMAGE}\n", "FROM ${PARENT_IMAGE} AS final\n"))
    assert named.layers == []


def test_a_stage_that_the_last_one_begins_with_is_the_images_too() -> None:
    output = BuildOutput("FROM a AS packages\nRUN a\nFROM b AS other\nRUN b\nFROM packages\nCOPY --from=other /b /b\n")
    begun = (
        "[packages 1/2] FROM a",
        "[packages 2/2] RUN a",
        "[other 2/2] RUN b",
        "[stage-2 1/1] COPY --from=other /b /b",
    )
    for number, step in enumerate(begun):
        output.feed(f"#{number} {step}\n")
    assert [step.place for step in output.layers] == ["packages 2/2", "stage-2 1/1"]


def test_steps_of_ten_and_more_are_padded() -> None:
    output = BuildOutput(ONE_STAGE)
    for line in ("#5 [ 2/10] RUN a\n", "#5 DONE 1.0s\n", "#6 [10/10] RUN b\n", "#6 DONE 0.0s\n"):
        output.feed(line)
    assert [(step.number, step.total) for step in output.layers] == [(2, 10), (10, 10)]


def test_buildx_prints_the_same_with_more_around_it() -> None:
    output, events = read("buildx_warning")
    assert output.failed is None
    assert [(step.number, step.seconds, step.is_cached) for step in output.layers] == [
        (2, 0.0, True),
        (3, 31.5, False),
        (10, 0.0, False),
    ]
    assert output.layers[1].summary == "RUN /mnt/install-packages"
    # Said again, after the lines of another one, it does not begin again.
    assert [vertex.number for vertex in events].count(1) == 2
    context = [vertex.is_done for vertex in events if vertex.name == "[internal] load build context"]
    assert len(context) == 2


def test_a_failure_in_buildx_is_known_with_its_step() -> None:
    output, _ = read("buildx_failing", "FROM x AS packages\nRUN a\nFROM packages\nCOPY jobs /jobs\n")
    assert output.failed
    assert (output.failed.place, output.failed.summary) == ("packages 4/4", "RUN /mnt/install-packages")
    assert list(output.failed.tail)[-1] == "ModuleNotFoundError: No module named 'nothing_like_it'"
    assert str(output.failed.error).endswith("did not complete successfully: exit code: 1")
    assert output.failed.base is None


def test_a_step_that_prints_what_buildkit_would_is_not_believed() -> None:
    output = BuildOutput(ONE_STAGE)
    for line in ("#5 [2/3] RUN a\n", "#5 0.059 #5 DONE 0.1s\n", "#5 0.060 #6 [3/3] RUN b\n"):
        output.feed(line)
    assert [step.is_done for step in output.steps] == [False]
    assert list(output.steps[0].tail) == ["#5 DONE 0.1s", "#6 [3/3] RUN b"]


def test_the_failing_step_is_known_with_the_end_of_what_it_printed() -> None:
    output, _ = read("cpu_failing")
    assert output.failed
    assert (output.failed.place, output.failed.summary) == ("6/7", "RUN /mnt/install-jobs")
    assert output.failed.tail[-1] == "ModuleNotFoundError: No module named 'nothing_like_it'"
    assert output.failed.error == "executor failed running [/bin/sh -c /mnt/install-jobs]: exit code: 1"
    assert output.failed.base is None


@pytest.mark.parametrize("name", ["base_unknown", "base_unreachable"])
def test_a_base_that_cannot_be_had_is_known_by_its_name(name: str) -> None:
    output, _ = read(name)
    assert output.steps == []
    assert output.failed
    assert str(output.failed.base).endswith("/stand-in/python:3.11")
    assert str(output.failed.error).endswith({"base_unknown": "not found", "base_unreachable": "refused"}[name])


@pytest.mark.parametrize(
    ("name", "place"), [("disk_full_in_run", "4/7"), ("disk_full_in_copy", "2/4")], ids=["in a program", "in BuildKit"]
)
def test_a_full_disk_is_known_wherever_it_shows(name: str, place: str) -> None:
    output, _ = read(name)
    assert output.failed
    assert output.failed.place == place
    said = "\n".join([*output.failed.tail, str(output.failed.error)])
    assert engine.is_disk_full(said)
    assert "no space left on device" in str(engine.disk_full(said)).lower()
    assert not engine.is_disk_full((RECORDED / "cpu_failing.txt").read_text())
