import pytest

from jobs.core.log_lines import Progress


def test_progress_is_read_back_out_of_a_line_of_the_log() -> None:
    progress = Progress(25, 100, "loss 0.41")
    assert str(progress) == "[progress] 25/100 loss 0.41"
    assert Progress.parse(f"2026-11-21 12:00:05 {progress}") == progress
    assert Progress.parse(str(Progress(0, 100))) == Progress(0, 100)


@pytest.mark.parametrize("line", ["", "25/100", "[progress] of the war", "[progress] a/100", "progress 25/100"])
def test_other_lines_are_no_progress(line: str) -> None:
    assert Progress.parse(line) is None
