"""Can the modules of an image be imported, each in a process of its own? Takes their names."""

import json
import subprocess
import sys

if __name__ == "__main__":
    modules: list[str] = json.loads(sys.argv[1])
    failures = []
    for module in modules:
        done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)
        if done.returncode:
            failures.append(f"import {module}: {(done.stderr.strip() or str(done.returncode)).splitlines()[-1]}")
    if failures:
        sys.exit("; ".join(failures))
    print(", ".join(modules))
