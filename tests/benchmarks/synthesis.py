"""How long `cdk synth` takes, and where the time goes.

python -m tests.benchmarks.synthesis              one stage cold and warm, then 2, 4 and 8 stages
python -m tests.benchmarks.synthesis --repeat 5   more runs of each; the fastest counts

Cold: nothing in the caches of Python and jsii. Warm: a second run. Ratios are against one stage, warm.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.synthesis", description=__doc__)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the fastest counts")
    parser.add_argument("--stages", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stages is not None:
        _synthesise(options.stages)
        return
    cold = _cold()
    print(f"one stage, cold   {cold['total']:6.1f} s")
    one = _best(1, options.repeat)
    for stages in (1, 2, 4, 8):
        best = one if stages == 1 else _best(stages, options.repeat)
        parts = "  ".join(f"{name} {seconds:.1f}" for name, seconds in best.items() if name != "total")
        ratio = best["total"] / one["total"]
        print(f"{stages} stage{'s' if stages > 1 else ' '}, warm   {best['total']:6.1f} s  x{ratio:.2f}  ({parts})")


def _cold() -> dict[str, float]:
    """With neither compiled Python of ours nor what jsii has unpacked."""
    with tempfile.TemporaryDirectory() as empty:
        return _run(1, PYTHONPYCACHEPREFIX=f"{empty}/python", XDG_CACHE_HOME=f"{empty}/jsii", HOME=empty)


def _best(stages: int, repeat: int) -> dict[str, float]:
    return min((_run(stages) for _ in range(repeat)), key=lambda times: times["total"])


def _run(stages: int, **environment: str) -> dict[str, float]:
    """A process of its own, as the CDK CLI starts one."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.synthesis", "--stages", str(stages)],
        cwd=ROOT,
        env={**os.environ, "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    parts: dict[str, float] = json.loads(done.stdout)
    return {**parts, "total": time.perf_counter() - started}


def _synthesise(stages: int) -> None:
    """Prints where the time went, as JSON."""
    times = {}
    started = time.perf_counter()
    import aws_cdk as cdk

    from infra.app import build
    from infra.settings import STAGES

    times["imports"] = time.perf_counter() - started
    directory = tempfile.mkdtemp()
    try:
        started = time.perf_counter()
        context = json.loads((ROOT / "cdk.json").read_text())["context"]
        app = cdk.App(context=context, outdir=directory)
        build(app, [replace(STAGES["prod"], name=f"stage{index}") for index in range(stages)])
        times["constructs"] = time.perf_counter() - started
        started = time.perf_counter()
        app.synth()
        times["templates and rules"] = time.perf_counter() - started
    finally:
        shutil.rmtree(directory)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
