"""Do the packages of an image fit together? Takes the names that count: a base may hold others, with complaints."""

import json
import subprocess
import sys

if __name__ == "__main__":
    ours: list[str] = json.loads(sys.argv[1])
    command = [sys.executable, "-m", "pip", "check", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not done.stdout.strip():
        sys.exit(done.stderr.strip() or f"pip check ended with exit code {done.returncode}")
    lines = done.stdout.splitlines() if done.returncode else []
    complaints = [line for line in lines if line.split()[0].lower().replace("_", "-") in ours]
    if complaints:
        sys.exit("; ".join(complaints))
    print(
        f"pip check: {len(lines)} complaints of packages that only the base needs"
        if lines
        else "pip check: none broken"
    )
