"""A checkpoint written in the background equals the one that the Trainer would have written."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer

from jobs.container.saving import snapshot
from jobs.container.saving.snapshot import BackgroundSave, Snapshot, _why_no_copy, available_bytes
from jobs.container.trainer.trainer import Options, trainer_class
from jobs.core.locations import S3Location

RUN = S3Location("runs", "research/some-20260102-030405-0a1b/")
MEMINFO = "MemTotal:  4000000 kB\nMemFree:  1000 kB\nMemAvailable:  3000000 kB\n"


class Writes:
    """Records what a save leaves to be written."""

    def __init__(self) -> None:
        self.left: list[Callable[[Path], None]] = []

    def begin(self) -> None:
        assert not self.left, "the copy was not written"

    def write_first(self, write: Callable[[Path], None]) -> None:
        self.left.append(write)


def test_background_save_writes_what_the_trainer_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, short = Writes(), Writes()
    trained(tmp_path / "plain", None)
    model = trained(tmp_path / "copied", copied)
    monkeypatch.setattr(snapshot, "available_bytes", lambda: 1000)
    trained(tmp_path / "short of memory", short)

    expected = contents(tmp_path / "plain")
    assert {"model.safetensors", "config.json", "optimizer.pt", "scheduler.pt", "rng_state.pth"} <= expected.keys()
    assert "model.safetensors" not in contents(tmp_path / "copied")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    [write] = copied.left
    write(tmp_path / "copied" / "checkpoint-2")
    assert contents(tmp_path / "copied") == expected
    assert not short.left
    assert contents(tmp_path / "short of memory") == expected


def trained(folder: Path, writes: Writes | None) -> Any:
    """Train a model with tied weights and a buffer for two steps, and save the second."""
    from transformers import BertConfig, BertForMaskedLM, TrainingArguments, set_seed

    set_seed(7)
    config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model = BertForMaskedLM(config)
    model.register_buffer("passes", torch.zeros(3))
    examples = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(4)]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=2, save_steps=2, use_cpu=True, disable_tqdm=True, report_to=[]
    )
    if writes is None:
        trainer = Trainer(model=model, args=arguments, train_dataset=examples)
    else:
        options = Options(background_save=BackgroundSave(RUN, writes))  # type: ignore[arg-type]
        trainer = trainer_class(Trainer)(model=model, args=arguments, train_dataset=examples, options=options)
    trainer.train()
    return model


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files without those that contain the folder name."""
    files = (folder / "checkpoint-2").iterdir()
    return {path.name: path.read_bytes() for path in files if path.name != "training_args.bin"}


class OwnWay(Trainer):  # type: ignore[misc]  # transformers has no types
    """Overrides how its model is saved, as sentence-transformers does."""

    def _save(self, *_: Any, **__: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("base", "changes", "reason"),
    [
        (Trainer, {}, None),
        (OwnWay, {}, "OwnWay overrides how they are saved"),
        (Trainer, {"is_deepspeed_enabled": True}, "each rank has only a part of them"),
        (Trainer, {"model": SimpleNamespace(peft_config={"default": {}})}, "they are adapters, which are small"),
    ],
)
def test_trainer_writes_what_cannot_be_copied(base: type[Any], changes: dict[str, Any], reason: str | None) -> None:
    trainer = object.__new__(trainer_class(base))
    vars(trainer).update({"is_deepspeed_enabled": False, "is_fsdp_enabled": False, "model": None, **changes})
    assert _why_no_copy(trainer) == reason


def test_snapshot_keeps_values_and_reuses_memory() -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    state = {
        "model": {"a": tied, "b": tied, "c": torch.full((3,), 0.5, dtype=torch.bfloat16), "empty": torch.empty(0, 4)},
        "optimizer": {"state": {0: {"step": torch.tensor(3), "turned": tied.T}}, "groups": [{"betas": (0.9, 0.95)}]},
    }
    room = Snapshot()
    copy = room.of(state)
    tied += 1
    assert copy["model"]["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copy["model"]["b"] is copy["model"]["a"]
    assert copy["model"]["c"].dtype == torch.bfloat16
    assert copy["model"]["c"].tolist() == [0.5] * 3
    assert copy["model"]["empty"].shape == (0, 4)
    assert copy["optimizer"]["state"][0]["step"] == 3
    assert copy["optimizer"]["state"][0]["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert copy["optimizer"]["groups"] == [{"betas": (0.9, 0.95)}]
    again = room.of(state)
    assert again["model"]["a"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert again["model"]["a"].data_ptr() == copy["model"]["a"].data_ptr()


@pytest.mark.parametrize(
    ("files", "available"),
    [
        pytest.param({}, None, id="not Linux"),
        pytest.param({"proc/meminfo": MEMINFO}, 3_072_000_000, id="no limit"),
        pytest.param(
            {
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/memory.max": "2000000000\n",
                "sys/fs/cgroup/memory.current": "1500000000\n",
                "sys/fs/cgroup/memory.stat": "anon 1300000000\ninactive_file 200000000\n",
            },
            700_000_000,
            id="less by the container's limit",
        ),
    ],
)
def test_available_memory_respects_host_and_container(
    files: dict[str, str], available: int | None, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert available_bytes(tmp_path) == available
