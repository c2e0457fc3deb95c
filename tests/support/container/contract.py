"""Run the container's tests with the packages of Gaudi's releases; all other tests use those of the CPU release.

    make contract                        all of Gaudi's rows of images/releases.toml
    make contract RELEASE=1.24.0         one row

For each row, the tests marked `every_release` run with the gaudi image's packages: those of the HPU's two branches, and
trainings on a CPU. The real GaudiTrainer, and the real Trainer in its HPU mode, train on a CPU.
optimum_habana_on_cpu.py and transformers_on_hpu.py describe the replacements of Habana's packages. Python and PyTorch
are the laptop's in every row.
"""

import os
import subprocess
import sys

from jobs.core.errors import TrainyardError
from jobs.core.images import release, releases_of
from jobs.images.lock import ROOT
from tests.support.container.image_environment import RELEASE_VARIABLE, python_of

COMMAND = (
    sys.executable,
    "-m",
    "pytest",
    "-m",
    "every_release",
    "-p",
    "no:cacheprovider",
    "-q",
    "tests/jobs/container",
)


def main(names: list[str]) -> int:
    """Test the given rows, or all. Returns 0 if every row passed."""
    failed = []
    for row in map(release, names or releases_of("gaudi")):
        with_it = f"optimum-habana {row.optimum_habana}, transformers {row.transformers}, accelerate {row.accelerate}"
        print(f"==> release {row.name}: {with_it}", flush=True)
        python_of(row.name)
        ended = subprocess.run(COMMAND, env={**os.environ, RELEASE_VARIABLE: row.name}, cwd=ROOT, check=False)
        failed += [row.name] * bool(ended.returncode)
    print(f"failed: {', '.join(failed)}" if failed else "all passed", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TrainyardError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
