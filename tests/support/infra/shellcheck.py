"""Shellcheck, on scripts that are built and lie in no file."""

import subprocess
import sys
from pathlib import Path


def shellcheck(script: str, *options: str) -> tuple[int, str]:
    """Return shellcheck's exit code and what it found."""
    program = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([program, *options, "-"], input=script, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout
