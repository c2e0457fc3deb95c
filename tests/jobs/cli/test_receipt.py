"""`trainyard receipt`, and commands on records that are damaged or from a later release."""

import itertools
from collections.abc import Callable

import pytest

from jobs.aws.connection import Aws
from jobs.cli.app import app
from jobs.cli.terminal import run_reporting
from jobs.core.locations import S3Location
from jobs.core.records import Receipt
from jobs.core.stage import DeployedStage
from jobs.core.words import size
from tests.support.jobs.recorded_runs import files_of, three_attempts

RUN = three_attempts(20, run_id="billed-20261101-120000-00ab")
assert RUN.receipt is not None
RECEIPT = RUN.receipt
NUMBERS = itertools.count(1)
"""Numbers of the runs. Each test uses a new run, because a process warns only once about a file."""

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(emulated: Aws, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Command:
    """Return a function that runs a command in this process and returns exit code, output, and warnings and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        caplog.clear()
        code = run_reporting(lambda words: app(list(words), standalone_mode=False), arguments)
        out, err = capsys.readouterr()
        return code, out, "\n".join([*caplog.messages, err]).strip()

    return run


@pytest.fixture
def place(emulated: Aws, stage: DeployedStage) -> S3Location:
    """Create a run with all records, and return its folder."""
    found = S3Location(stage.run_bucket, f"research/billed-20261101-120000-{next(NUMBERS):04x}/")
    for name, content in files_of(RUN).items():
        emulated.s3.put_object(Bucket=found.bucket, Key=(found / name).key, Body=content)
    return found


def run_of(place: S3Location) -> str:
    return place.key.strip("/").rpartition("/")[2]


def put(aws: Aws, place: S3Location, **contents: bytes) -> None:
    for name, content in contents.items():
        aws.s3.put_object(Bucket=place.bucket, Key=(place / name.replace("_", ".")).key, Body=content)


def test_a_receipt_shows_result_cost_and_storage(emulated: Aws, place: S3Location, command: Command) -> None:
    code, out, err = command("receipt", run_of(place))
    assert (code, err) == (0, "")
    rows = {label: value.strip() for label, _, value in (line.partition("  ") for line in out.splitlines())}
    assert (rows["accuracy"], rows["majority class"], rows["samples/s"]) == ("0.874", "0.070", "907.3")
    assert rows["in AWS it would cost"].startswith("0.25 USD; On-Demand 0.83 USD (0.06")
    assert rows["price"].startswith(f"as of {RECEIPT.price_date}, philschmid.de/pre-training-bert-habana; ")
    assert rows["stored"].endswith(" a month at 0.023 USD per GB-month")
    before = Receipt.model_validate_json(command("receipt", run_of(place), "-o", "json")[1])
    assert before.model_copy(update={"stored": None}) == RECEIPT
    key = (place / "checkpoints/step-3/optimizer.pt").key
    emulated.s3.put_object(Bucket=place.bucket, Key=key, Body=b"x" * 2_000_000)
    kept = Receipt.model_validate_json(command("receipt", run_of(place), "-o", "json")[1]).stored
    assert kept is not None
    assert before.stored is not None
    assert kept.all_bytes == before.stored.all_bytes + 2_000_000
    assert kept.checkpoint_bytes == before.stored.checkpoint_bytes + 2_000_000
    # Deleted and replaced files cost as long as S3 keeps their versions.
    emulated.s3.put_object(Bucket=place.bucket, Key=key, Body=b"x" * 1_000_000)
    emulated.s3.delete_object(Bucket=place.bucket, Key=key)
    pruned = Receipt.model_validate_json(command("receipt", run_of(place), "-o", "json")[1]).stored
    assert pruned is not None
    assert (pruned.all_bytes, pruned.checkpoint_bytes) == (before.stored.all_bytes, before.stored.checkpoint_bytes)
    assert pruned.old_version_bytes == 3_000_000
    assert pruned.usd_per_month == pytest.approx((pruned.all_bytes + 3_000_000) / 2**30 * 0.023)
    assert f", and {size(3_000_000)} of old versions: " in command("receipt", run_of(place))[1]
    emulated.s3.delete_object(Bucket=place.bucket, Key=(place / "receipt.json").key)
    code, _, err = command("receipt", run_of(place))
    assert code == 4
    assert err.startswith(f"error: {run_of(place)} has no receipt: ")


@pytest.mark.parametrize("content", [b'{"run_id": "pro', b"\xff", b"[" * 100_000])
def test_unreadable_records_are_named_and_the_rest_is_shown(
    emulated: Aws, place: S3Location, command: Command, content: bytes
) -> None:
    names = ("receipt_json", "classes_json", "data_json", "code_json", "spec_yaml")
    line = files_of(RUN)["metrics.jsonl"].splitlines()[0] + b"\n"
    put(emulated, place, **dict.fromkeys(names, content), metrics_jsonl=line + content)
    code, _, err = command("report", run_of(place))
    assert code == 0, err
    for name in ("receipt.json", "classes.json", "data.json", "code.json"):
        assert f"warning: {place}{name} cannot be read and is skipped" in err
    assert f"warning: {place}metrics.jsonl: skipped 1 line that cannot be read, the first at line 2" in err
    assert f"warning: {place}spec.yaml: " in err
    for arguments, name in ((("receipt", run_of(place)), "receipt"), (("fetch", run_of(place), "--code"), "code")):
        code, _, err = command(*arguments)
        assert code == 1
        assert f"error: {place}{name}.json cannot be read: " in err


def test_a_stored_spec_has_the_size_limit_of_a_spec_file(emulated: Aws, place: S3Location, command: Command) -> None:
    put(emulated, place, spec_yaml=b"name: " + b"x" * 1_000_000)
    code, _, err = command("report", run_of(place))
    assert code == 0, err
    assert f"warning: {place}spec.yaml: larger than 1 MB, the limit for a spec" in err
