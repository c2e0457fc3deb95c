"""The push of a model to the Hugging Face Hub: refused before the training, or done once the model is on S3."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from jobs.container.hub import check, model_card, push
from jobs.container.hub_saves import SavePushes
from jobs.core.errors import TrainyardError
from jobs.core.images import release
from jobs.core.locations import S3Location
from jobs.spec.kinds.finetune_classification import FinetuneClassification
from jobs.spec.recipe import HubPush
from tests.support.container import image_environment
from tests.support.container.hub_server import TOKEN, Hub
from tests.support.container.launching import Run
from tests.support.waiting import wait_until

REPOSITORY = "acme/reviews"
COMMIT = "86b5e0934494bd15c9632b12f734a8a67f723594"
IMAGE = "trainyard/cpu:1.21.0-0123456789ab"


@pytest.mark.every_release
def test_the_model_is_pushed_with_a_card_without_the_token(run: Run, recipe: tuple[str, ...], hub: Hub) -> None:
    launched = run.start(
        *recipe,
        "--epochs=2",
        f"--push-to-hub={REPOSITORY}",
        nproc=2,
        TRAINYARD_IMAGE=IMAGE,
        **hub.environment,
    )
    launched.wait_for_line("[progress] 0/24")
    assert hub.private == {REPOSITORY: True}, "made before anything is trained"
    assert not hub.commits
    commands = [" ".join(process.cmdline()) for process in (psutil.Process(launched.process.pid), *launched.ranks())]
    assert launched.wait() == 0, launched.output

    assert f"hub: pushed to {hub.url}/{REPOSITORY}\n" in launched.lines
    assert hub.commits == [f"Run {run.receipt().run_id}"]
    on_s3 = {name.removeprefix("model/"): run.read(name) for name in run.keys("model/")}
    assert hub.files[REPOSITORY] == on_s3
    assert "model.safetensors" in hub.by_lfs[REPOSITORY]
    assert not {"README.md", "config.json"} & hub.by_lfs[REPOSITORY]
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= on_s3.keys()
    card = on_s3["README.md"].decode()
    assert card.startswith('---\nlibrary_name: "transformers"\ntags: ["trainyard"]\n---\n')
    for row in (
        f"| eval_accuracy | {run.receipt().result['eval_accuracy']:.6g} |",
        f"| model | {recipe[0].removeprefix('--model=')} |",
        "| learning_rate | 0.003 |",
        "| ranks | 2 |",
        "| accelerator | cpu |",
        f"| image | {IMAGE} |",
        f"| run | {run.location} |",
    ):
        assert row in card
    assert f"`{run.receipt().run_id}`" in card
    software = release(image_environment.chosen_release(), of="cpu")
    assert f"| transformers | {software.transformers} |" in card

    assert commands
    assert not [command for command in commands if TOKEN in command]
    assert TOKEN not in launched.output
    assert not [name for name in run.keys("") if TOKEN.encode() in run.read(name)]


def test_saves_are_pushed_in_order_while_the_training_continues(
    run: Run, long_recipe: tuple[str, ...], hub: Hub
) -> None:
    flags = (
        *long_recipe,
        "--epochs=20",
        "--checkpoint-every-steps=20",
        f"--push-to-hub={json.dumps({'repository': REPOSITORY, 'each_save': True})}",
    )
    # GIVEN a hub that refuses a push, WHEN the training continues, THEN later saves are pushed
    hub.refuses_commits = True
    launched = run.start(*flags, nproc=2, **hub.environment)
    launched.wait_for_line(f"warning: the model of step 20 was not pushed to {REPOSITORY}: 403")
    hub.refuses_commits = False
    first = int(launched.wait_for_line("hub: pushed step").split()[3])
    pushed = hub.files[REPOSITORY]
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= pushed.keys()
    assert not [name for name in pushed if name.endswith((".pt", ".pth", ".bin")) or name == "trainer_state.json"]
    assert f"| step | {first} |" in pushed["README.md"].decode()
    assert launched.kill(signal.SIGTERM) == 75, launched.output
    assert launched.output.count("was not pushed") == 1

    # WHEN the run is resumed, THEN no save is pushed again, and the final model is the last commit
    resumed = run.attempt(*flags, nproc=2, attempt=2, **hub.environment)
    name = run.receipt().run_id
    *saves, final = hub.commits
    steps = [int(message.removeprefix(f"Run {name}, step ")) for message in saves]
    assert steps[0] == first
    assert steps == sorted(set(steps))
    assert final == f"Run {name}"
    assert hub.files[REPOSITORY] == {key.removeprefix("model/"): run.read(key) for key in run.keys("model/")}
    assert TOKEN not in launched.output + resumed.output


@pytest.fixture
def save(tmp_path: Path) -> Callable[[SavePushes, int], None]:
    """Save a checkpoint, which is deleted as soon as it is uploaded."""

    def saved(pushes: SavePushes, step: int) -> None:
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        for name in ("config.json", "model.safetensors", "optimizer.pt"):
            (folder / name).write_text(f"{step}")
        pushes.saved(step, folder)
        shutil.rmtree(folder)

    return saved


def _pushes(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: Callable[[], bool]) -> SavePushes:
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    run = S3Location.parse("s3://runs/research/films-1/")
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def complete(folder: Path, step: int) -> None:
        (folder / "README.md").write_text(f"card of {step}")

    return SavePushes(REPOSITORY, run=run, scratch=scratch, complete=complete, stops=stops)


def test_only_the_newest_save_waits_for_a_push(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[SavePushes, int], None]
) -> None:
    pushes = _pushes(hub, tmp_path, monkeypatch, stops=lambda: False)
    hub.may_commit.clear()
    save(pushes, 8)
    assert hub.held.wait(60)
    save(pushes, 16)
    save(pushes, 24)
    hub.may_commit.set()
    wait_until(lambda: len(hub.commits), lambda found: found == 2)
    assert hub.commits == ["Run films-1, step 8", "Run films-1, step 24"]
    files = {"README.md": b"card of 24", "config.json": b"24", "model.safetensors": b"24"}
    assert hub.files[REPOSITORY] == files
    pushes.close()
    assert not list((tmp_path / "scratch").iterdir())


def test_no_push_runs_once_the_attempt_must_stop(
    *,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    save: Callable[[SavePushes, int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    notices: list[str] = []
    pushes = _pushes(hub, tmp_path, monkeypatch, stops=lambda: bool(notices))
    caplog.set_level("INFO")
    hub.may_commit.clear()
    save(pushes, 8)
    assert hub.held.wait(60)
    notices.append("Spot")
    wait_until(lambda: caplog.messages, bool)
    assert caplog.messages == ["hub: the push of step 8 was stopped"]
    hub.held.clear()
    save(pushes, 16)
    pushes.close()
    assert not hub.held.is_set()


def test_a_failed_push_is_a_warning_that_says_how_to_repeat(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.refuses_commits = True
    (tmp_path / "config.json").write_text("{}")
    push(tmp_path, run=S3Location.parse("s3://runs/research/films-1/"), repository=REPOSITORY)
    [warning] = caplog.messages
    assert warning.startswith(f"warning: the model was not pushed to {REPOSITORY}: ")
    assert "403" in warning
    repeated = "aws s3 cp --recursive s3://runs/research/films-1/model/ model"
    assert warning.endswith(f"{repeated} && hf upload {REPOSITORY} model . --private")
    assert TOKEN not in warning


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        ({}, f"push_to_hub: HF_TOKEN is not set, so nothing can be pushed to {REPOSITORY}\nNext: store the team's"),
        ({"HF_TOKEN": "hf_stale"}, f"push_to_hub: the token may not write to {REPOSITORY}: the hub answered 4"),
    ],
    ids=["no token", "stale token"],
)
def test_an_impossible_push_is_refused_before_the_training(
    hub: Hub, environment: dict[str, str], error: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    recipe = FinetuneClassification(model="m", train_data="t.csv", push_to_hub=HubPush(repository=REPOSITORY))
    with pytest.raises(TrainyardError) as refused:
        check(recipe, is_first_attempt=True)
    assert str(refused.value).startswith(error)
    assert "hf_stale" not in str(refused.value)
    # An expired token must not end a training that has made progress
    if environment:
        check(recipe, is_first_attempt=False)
        assert "unexpected answer from the hub" in caplog.text


def test_the_card_names_what_the_hub_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = FinetuneClassification(
        model="hf://google-bert/bert-base-uncased",
        train_data=["hf://acme/films?config=en", "hf://acme/films?config=de"],
        push_to_hub=HubPush(repository=REPOSITORY),
    )
    # The cache, as after a download of the model.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--google-bert--bert-base-uncased"
    snapshot = cached / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    card = model_card(
        S3Location.parse("s3://runs/research/films-1/"), recipe, {"eval_accuracy": 0.91234567}, {"ranks": 8}
    )
    _, metadata, text = card.split("---\n", 2)
    values = {line.partition(": ")[0]: json.loads(line.partition(": ")[2]) for line in metadata.splitlines()}
    assert values == {
        "library_name": "transformers",
        "tags": ["trainyard"],
        "base_model": "google-bert/bert-base-uncased",
        "datasets": ["acme/films"],
    }
    assert text.startswith(f"\n# {REPOSITORY}\n\nFine-tune a pretrained encoder")
    assert "| eval_accuracy | 0.912346 |" in text
    assert f"| model's commit | {COMMIT} |" in text
    assert "| run | s3://runs/research/films-1/ |" in text
    assert "| image |" not in text, "there is none on a laptop"
    assert "| train_data.1 | hf://acme/films?config=de |" in text


@pytest.mark.parametrize("name", ["reviews", "acme/a/b", "../x"])
def test_an_invalid_repository_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="push_to_hub"):
        FinetuneClassification.model_validate({"model": "m", "train_data": f"{tmp_path}/t.csv", "push_to_hub": name})
