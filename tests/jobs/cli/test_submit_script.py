"""Submitting a script: the ready-made spec, its code, and what is refused before anything is uploaded."""

import csv
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.aws.connection import Aws
from jobs.core.errors import NotFoundError, TrainyardError, UsageError
from jobs.core.instance_types import instance_type
from jobs.core.locations import S3Location
from jobs.core.stage import DeployedStage
from jobs.runs.code_archive import pack_code
from jobs.runs.cuda_calls import cuda_note
from jobs.runs.planning import plan_run
from jobs.runs.script_requirements import check_requirements
from jobs.runs.secrets import check_spec
from jobs.runs.spec_file import READY_SPECS
from jobs.spec.code import MAX_CODE_BYTES
from jobs.spec.spec import parse_spec
from tests.jobs.cli.conftest import Trainyard
from tests.support.container.reviews import reviews
from tests.support.container.scripts import write_files


def test_the_ready_made_spec_trains_and_its_code_is_fetched(
    aws_trainyard: Trainyard, emulated: Aws, stage: DeployedStage, tmp_path: Path
) -> None:
    shutil.copytree(READY_SPECS / "my-script", tmp_path / "code", ignore=shutil.ignore_patterns("__pycache__"))
    write_files(tmp_path / "code", {"notes.txt": "mine", ".trainyardignore": "notes.*\n"})
    with (tmp_path / "reviews.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(reviews(200, seed=1, labels=(0, 1)))
    spec = yaml.safe_load((READY_SPECS / "my-script.yaml").read_text())
    spec["arguments"] |= {"code": "code", "inputs": {"reviews": "reviews.csv"}}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))

    looked = aws_trainyard("submit", "spec.yaml", "--dry-run", "-o", "json")
    assert [line.split()[-1] for line in looked.stderr.splitlines() if line.startswith("code:")] == ["train.py"]
    command = json.loads(looked.stdout)["ecsPropertiesOverride"]["taskProperties"][0]["containers"][0]["command"]
    assert "--command=train.py {inputs.reviews}" in command

    done = aws_trainyard("submit", "spec.yaml", expect=0)
    run_id = done.stdout.splitlines()[0]
    assert "1 file, " in done.stderr
    assert "code: uploaded\n" in done.stderr
    assert "of 20 held-out reviews are classified correctly" in done.stdout
    assert "eval_accuracy" in done.stdout, "the receipt has the metrics"

    fetched = aws_trainyard("fetch", run_id, "--code")
    assert fetched.stdout.split() == [f"runs/{run_id}/code/train.py"]
    assert (tmp_path / fetched.stdout.strip()).read_bytes() == (tmp_path / "code/train.py").read_bytes()
    assert "1 file of " in aws_trainyard("receipt", run_id).stdout
    assert "code: already on S3\n" in aws_trainyard("submit", "spec.yaml", "--detach", "--set", "name=again").stderr
    aws_trainyard("cancel", "again", expect=0)

    record = emulated.s3.get_object(Bucket=stage.run_bucket, Key=f"research/{run_id}/code.json")["Body"].read()
    code = S3Location.parse(json.loads(record)["location"])
    emulated.s3.put_object(Bucket=code.bucket, Key=code.key, Body=b"garbage")
    refused = aws_trainyard("fetch", run_id, "--code", "--to", "elsewhere", expect=2)
    assert f"{code} is damaged" in refused.stderr
    assert not list((tmp_path / "elsewhere").rglob("*.py"))
    emulated.s3.delete_object(Bucket=code.bucket, Key=code.key)  # others pack the same files


KEY = "-----BEGIN OPENSSH " + "PRIVATE KEY-----\n"

PROJECT = '[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = [{}]\n'

LOCK = """version = 1
revision = 5
requires-python = ">=3.10"

[[package]]
name = "mine"
version = "1"
source = { virtual = "." }
"""

BAD: dict[str, tuple[dict[str, str], dict[str, Any], type[TrainyardError], str]] = {
    "no such folder": ({}, {"code": "elsewhere"}, NotFoundError, "/elsewhere does not exist"),
    "no such script": ({"tain.py": ""}, {}, UsageError, "has no file 'train.py'; did you mean 'tain.py'?"),
    "an ignored script": ({"train.py": "", "a": "", ".trainyardignore": "*.py"}, {}, UsageError, "excludes it"),
    "a file of secrets": ({"train.py": "", "app/.env": ""}, {}, UsageError, "app/.env (its name is typical of key"),
    "a key in a file": ({"train.py": KEY}, {}, UsageError, "train.py (it seems to hold a private key)"),
    "a folder called jobs": ({"train.py": "", "jobs/a.py": ""}, {}, UsageError, "has 'jobs' at its top"),
    "too large": ({"train.py": "", "weights.bin": "big"}, {}, UsageError, "more than 100: weights.bin (101.0 MB)"),
    "another torch": (
        {"train.py": "", "r.txt": "# of ours\npeft\ntransformers<5\n"},
        {"requirements": "r.txt"},
        UsageError,
        "r.txt, line 3: 'transformers<5' would replace transformers ",
    ),
    "a requirement that is not packed": (
        {"train.py": "", "r.txt": "-r base.txt\n", "base.txt": "", ".trainyardignore": "base.*\n"},
        {"requirements": "r.txt"},
        UsageError,
        "it needs 'base.txt', which is not packed",
    ),
    "an included requirement": (
        {"train.py": "", "r.txt": "-e .\n-r base.txt\n", "base.txt": "torch==1.0"},
        {"requirements": "r.txt"},
        UsageError,
        "base.txt, line 1: 'torch==1.0' would replace torch ",
    ),
    "a login in the requirements": (
        {
            "train.py": "",
            "r.txt": "-r base.txt\n",
            "base.txt": "--extra-index-url https://me:word@wheels.example/simple",
        },
        {"requirements": "r.txt"},
        UsageError,
        "base.txt, line 1: it seems to hold a login for https://…@wheels.example",
    ),
    "a file that is no lock": (
        {"train.py": "", "poetry.lock": ""},
        {"environment": "poetry.lock"},
        UsageError,
        "'poetry.lock' is neither a uv.lock nor 'own'",
    ),
    "a lock without its project": (
        {"train.py": "", "uv.lock": ""},
        {"environment": "uv.lock"},
        UsageError,
        "uv.lock needs a pyproject.toml beside it",
    ),
    "a lock that is not packed": (
        {"train.py": "", "pyproject.toml": "", "uv.lock": "", ".trainyardignore": "uv.*"},
        {"environment": "uv.lock"},
        UsageError,
        "has no file 'uv.lock' among the packed files",
    ),
    "a lock that is out of date": (
        {"train.py": "", "pyproject.toml": PROJECT.format('"idna"'), "uv.lock": LOCK},
        {"environment": "uv.lock"},
        UsageError,
        "uv.lock is out of date: pyproject.toml has changed since",
    ),
    "a damaged lock": (
        {"train.py": "", "pyproject.toml": PROJECT.format(""), "uv.lock": "?"},
        {"environment": "uv.lock"},
        UsageError,
        "uv.lock cannot be checked by uv: ",
    ),
    "a Python that the lock does not allow": (
        {"train.py": "", "pyproject.toml": PROJECT.format(""), "uv.lock": LOCK},
        {"environment": "uv.lock", "python": "3.9"},
        UsageError,
        "uv.lock is for Python >=3.10, not 3.9",
    ),
    "a Python without quotes": (
        {"train.py": "", "uv.lock": ""},
        {"environment": "uv.lock", "python": 3.13},
        UsageError,
        'arguments.python: 3.13 is not a Python version; write it in quotes: "3.13"',
    ),
    "a separate environment without requirements": (
        {"train.py": ""},
        {"environment": "own"},
        UsageError,
        "'environment: own' needs 'requirements'",
    ),
    "a login in pip's settings": (
        {"train.py": "", "pip.conf": "[global]\nindex-url = https://token@wheels.example/simple"},
        {},
        UsageError,
        "pip.conf (it seems to hold a login for https://…@wheels.example)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_code_is_refused_before_anything_is_uploaded(
    case: str, stage: DeployedStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, arguments, kind, message = BAD[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    write_files(tmp_path / "code", files)
    if "weights.bin" in files:
        with (tmp_path / "code/weights.bin").open("wb") as file:
            file.truncate(MAX_CODE_BYTES + 1_000_000)
    with pytest.raises(kind) as refused:
        check_script(stage, **arguments)
    assert message in str(refused.value)
    assert "\nNext: " in str(refused.value) or "module" in case or refused.value.args[0].startswith("a: arguments")


def check_script(stage: DeployedStage, job: str = "script", **arguments: Any) -> None:
    given = {"code": "code", "command": "train.py", **arguments}
    spec = parse_spec({"name": "a", "job": job, "arguments": given}, origin="a")
    check_requirements(stage, spec, pack_code(spec, stage)[1])


def test_an_own_environment_may_replace_torch_but_not_on_hpus(
    stage: DeployedStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"r.txt": "torch==2.9.0\n", "pyproject.toml": PROJECT.format(""), "uv.lock": LOCK}
    write_files(tmp_path / "code", {"train.py": "", **files})
    environments: list[dict[str, str]] = [{"environment": "uv.lock"}, {"environment": "own", "requirements": "r.txt"}]
    assert stage.emulated
    hpus = replace(stage, emulated_processes=None, instance_types=(instance_type("dl1.24xlarge"),))
    gpus = replace(hpus, instance_types=(instance_type("g5.48xlarge"),))
    for arguments in environments:
        check_script(stage, **arguments)
        check_script(gpus, **arguments)
        with pytest.raises(UsageError, match="has HPUs, which only work with the torch and habana") as refused:
            check_script(hpus, **arguments)
        assert "\nNext: remove 'environment' and add packages to the image's with 'requirements'" in str(refused.value)
    with pytest.raises(UsageError, match="would replace torch"):
        check_script(gpus, requirements="r.txt")
    with pytest.raises(UsageError, match=r"arguments\.environment: unknown"):
        check_script(gpus, "finetune-classification", environment="uv.lock")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"command": "bash run.sh"}, "starts with 'bash', which is not a Python script"),
        ({"command": "train.py {inputs.texts}"}, "unknown placeholder {inputs.texts}"),
        ({"command": "../train.py"}, "'../train.py' is not a file below the code's folder"),
        ({"inputs": {"texts": "ftp://a"}}, "arguments.inputs.texts: ftp://a: use hf://"),
        ({"streamed_inputs": ["texts"]}, "unknown input 'texts'"),
    ],
)
def test_an_error_in_the_spec_names_its_place(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_spec(
            {"name": "a", "job": "script", "arguments": {"code": ".", "command": "train.py", **arguments}}, origin="a"
        )
    assert message in str(refused.value)


def test_a_secret_in_a_spec_is_refused(emulated: Aws, stage: DeployedStage) -> None:
    given = {"code": "elsewhere", "command": "train.py", "parameters": {"index": "https://word@wheels.example/simple"}}
    spec = parse_spec({"name": "a", "job": "script", "arguments": given}, origin="a")
    with pytest.raises(UsageError) as refused:
        plan_run(emulated, stage, spec)
    assert refused.value.args[0].startswith("arguments.parameters.index: it seems to hold a ")
    assert "word" not in str(refused.value)


@pytest.mark.parametrize("value", ["6fc2a8e0b1d94c7a8e0b1d94c7a8e0b1d94c7a8e", "sk-Abcdefgh1234"])
def test_a_secret_in_a_variable_is_refused(value: str) -> None:
    given = {"name": "a", "job": "script", "arguments": {"code": ".", "command": "train.py"}}
    check_spec(parse_spec({**given, "env": {"PAD_TOKEN": "<pad>", "HF_TOKEN": "/run/token", "TOP_K": "5"}}, origin="a"))
    with pytest.raises(UsageError, match=r"env\.WANDB_API_KEY: it seems to hold a secret, but") as refused:
        check_spec(parse_spec({**given, "env": {"WANDB_API_KEY": value}}, origin="a"))
    assert value not in str(refused.value)


def test_cuda_calls_are_named_for_a_stage_with_hpus(
    stage: DeployedStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "one/train.py": "import lib.device\n# torch.cuda.x\ntorch.cuda.manual_seed_all(1)\ninit_process_group('nccl')",
        "lib/device.py": "from . import gaudi\ndevice = 'cuda' if on else 'cpu'\nmodel.cuda()\nmodel.to('cuda:1')\n",
        "other.py": "torch.cuda.set_device(0)\n",
        "lib/gaudi.py": "device = 'hpu' if x else 'cuda'\n",
    }
    write_files(tmp_path / "code", files)
    hpus = replace(stage, emulated_processes=None, instance_types=(instance_type("dl1.24xlarge"),))

    def notes(on: DeployedStage, **values: Any) -> list[str]:
        arguments = {"code": "code", "command": "train.py", "workdir": "one"}
        spec = parse_spec({"name": "a", "job": "script", "arguments": arguments, **values}, origin="a")
        return cuda_note(on, spec, pack_code(spec, on)[1])

    [note] = notes(hpus)
    assert "one/train.py:4 ('nccl'), lib/device.py:2 ('cuda'), lib/device.py:3 (.cuda() and 1 more line" in note
    assert not notes(replace(hpus, instance_types=(instance_type("g5.48xlarge"),)))
    assert not notes(hpus, env={"PT_HPU_GPU_MIGRATION": 1})
    with pytest.raises(
        UsageError, match=r"arguments\.workdir: .* has no folder 'ones' among the packed files; did you"
    ):
        notes(hpus, arguments={"code": "code", "command": "train.py", "workdir": "ones"})


def test_equal_files_are_equal_code_with_the_commit_from_git(tmp_path: Path, stage: DeployedStage) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.com")
        subprocess.run(["git", "-C", tmp_path / "one", *identity, *arguments], check=True, capture_output=True)

    write_files(tmp_path / "one", {"train.py": "1\n", "ignored.bin": "", ".gitignore": "*.bin\n"})
    write_files(tmp_path / "two", {"train.py": "1\n", ".gitignore": "*.bin\n", "__pycache__/train.pyc": ""})
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")

    def pack_of(folder: str) -> tuple[str, bool, bool]:
        arguments = {"code": str(tmp_path / folder), "command": "train.py"}
        spec = parse_spec({"name": "a", "job": "script", "arguments": arguments}, origin="a")
        resolved, pack = pack_code(spec, stage)
        assert pack is not None
        assert resolved.arguments["code"] == f"s3://{stage.run_bucket}/research/code/{pack.fingerprint}.tar.gz"
        return pack.fingerprint, bool(pack.commit), pack.dirty

    same = pack_of("one")
    assert same[1:] == (True, False)
    assert pack_of("two") == (same[0], False, False)
    write_files(tmp_path / "one", {"new.py": ""})
    assert pack_of("one")[1:] == (True, True)
    assert pack_of("one")[0] != same[0]
