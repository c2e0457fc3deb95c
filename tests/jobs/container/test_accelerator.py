"""The choice of the accelerator: what is refused, and what is logged about it."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from jobs.container import accelerator
from jobs.container.accelerator import Accelerator, Name, choose, of_rank
from jobs.container.kinds.pretrain_mlm import check_compiler
from jobs.core.errors import ConfigurationError, TrainyardError
from tests.support.container.launching import Run

CPUS = "clang++" if sys.platform == "darwin" else "g++"

NEXT = "Next: use an instance and an image that have it, or request 'cpu' or 'auto'"


def test_a_missing_accelerator_is_refused_before_ranks_start(run: Run, recipe: tuple[str, ...]) -> None:
    launched = run.attempt(*recipe, expect=1, TRAINYARD_ACCELERATOR="hpu")

    message = f"error: accelerator 'hpu' was requested, but no HPU found. {NEXT}\n"
    assert launched.lines == [message], "one line, and no line of a rank"
    assert run.keys() == [], "no attempt was started"
    assert not list(run.scratch.iterdir())


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this a node with HPUs: the driver's device files and, on request, Habana's package."""

    def make(cards: int, *, installed: bool = True, older_driver: bool = False) -> None:
        folder, name = (tmp_path / "dev", "hl") if older_driver else (tmp_path / "dev" / "accel", "accel")
        folder.mkdir(parents=True)
        for number in range(cards):
            (folder / f"{name}{number}").touch()
            (folder / f"{name}_controlD{number}").touch()
        elsewhere = tuple((str(tmp_path) + place, pattern) for place, pattern in accelerator.HPU_DEVICES)
        monkeypatch.setattr(accelerator, "HPU_DEVICES", elsewhere)
        if installed:
            package = tmp_path / "packages" / "habana_frameworks"
            package.mkdir(parents=True)
            (package / "__init__.py").write_text("raise RuntimeError('opens the driver')\n")
            monkeypatch.syspath_prepend(package.parent)

    return make


@pytest.mark.parametrize("older_driver", [False, True])
@pytest.mark.parametrize("asked", ["hpu", "auto"])
def test_one_card_per_rank_is_enough(node: Callable[..., None], asked: str, older_driver: bool) -> None:
    node(8, older_driver=older_driver)
    chosen = choose(asked, nproc_per_node=8)
    assert (chosen.name, chosen.devices, chosen.backend) == ("hpu", 8, "hccl")
    assert str(chosen) == {"hpu": "hpu (requested)", "auto": "hpu (auto: 8 found)"}[asked]
    assert of_rank(chosen.environment).name == "hpu"


def test_a_rank_gets_the_requested_trainer_and_its_mode(node: Callable[..., None]) -> None:
    node(1)
    for trainer, lazy in (("optimum-habana", "1"), ("transformers", "0")):
        environment = choose("hpu", nproc_per_node=1, hpu_trainer=trainer).environment  # type: ignore[arg-type]
        assert environment["PT_HPU_LAZY_MODE"] == lazy
        assert of_rank(environment).hpu_trainer == trainer
    assert choose("cpu", nproc_per_node=2).devices == 0
    assert choose("cpu", nproc_per_node=1, hpu_trainer="transformers").environment == {"TRAINYARD_ACCELERATOR": "cpu"}


def test_the_launcher_uses_and_logs_the_trainer_of_the_job(
    node: Callable[..., None], run: Run, recipe: tuple[str, ...], tmp_path: Path
) -> None:
    """The node has one card of eight, so the attempt ends before any rank starts."""
    node(1)
    program = (
        "import sys; from jobs.container import accelerator, launch; "
        f"accelerator.HPU_DEVICES = {accelerator.HPU_DEVICES}; sys.exit(launch.main())"
    )
    launched = run.attempt(
        *recipe,
        "--hpu-trainer=transformers",
        expect=75,
        program=("-c", program),
        TRAINYARD_ACCELERATOR="hpu",
        PYTHONPATH=str(tmp_path / "packages"),
    )
    assert "accelerator: hpu (requested), the Trainer of transformers in eager mode\n" in launched.lines


@pytest.mark.parametrize(
    ("name", "compiler", "complaint"),
    [
        ("cuda", "clang", None),
        ("cpu", CPUS, None),
        (
            "cuda",
            "g++",
            "needs a compiler on cuda; not found: gcc, clang\nNext: use the image `cuda`, which",
        ),
        ("hpu", "gcc", "torch_compile is not supported on HPUs: .*\nNext: remove torch_compile"),
    ],
)
def test_torch_compile_needs_a_compiler_and_no_hpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Name, compiler: str, complaint: str | None
) -> None:
    program = tmp_path / compiler
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    accelerator = Accelerator(name=name, devices=1, reason="a test")
    with nullcontext() if complaint is None else pytest.raises(ConfigurationError, match=complaint):
        check_compiler(accelerator)
    # PyTorch and Triton use the compilers in these variables
    if name != "hpu":
        monkeypatch.setenv("CC" if name == "cuda" else "CXX", str(program))
        check_compiler(accelerator)


@pytest.mark.parametrize(
    ("asked", "cards", "installed", "message"),
    [
        ("cuda", 0, False, "'cuda' was requested, but no CUDA device found\nNext: use an instance"),
        ("hpuu", 0, False, "accelerator 'hpuu' is unknown; did you mean 'hpu'?"),
        ("hpu", 8, False, r"but no Habana PyTorch \(habana_frameworks\) installed\nNext: "),
        ("hpu", 2, True, r"4 ranks need a card each, but this node has 2 \(hpu\)\nNext: --nproc-per-node=2"),
    ],
)
def test_missing_or_too_few_accelerators_are_refused(
    node: Callable[..., None], monkeypatch: pytest.MonkeyPatch, *, asked: str, cards: int, installed: bool, message: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    node(cards, installed=installed)
    with pytest.raises(TrainyardError, match=message):
        choose(asked, nproc_per_node=4)


@pytest.mark.parametrize(
    ("cards", "installed", "because"),
    [
        (0, False, "no HPU found"),
        (8, False, "no Habana PyTorch (habana_frameworks) installed"),
        (2, True, "2 HPU for 4 ranks"),
    ],
)
def test_auto_falls_back_to_the_cpu_with_a_reason(
    node: Callable[..., None], monkeypatch: pytest.MonkeyPatch, cards: int, installed: bool, because: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    node(cards, installed=installed)
    chosen = choose("auto", nproc_per_node=4)
    assert str(chosen) == f"cpu (auto: {because}, no CUDA device found)"
    assert chosen.backend == "gloo"
