# `trainyard images push` in CodeBuild, at the root of the source; infra/image/stack.py sets its variables.
set -euo pipefail

# Install the versions that requirements.txt pins. Editable, because images are built from this folder; with uv, because pip
# accepts no folder together with hash-checked packages.
environment="$(mktemp --directory)"
python3 -m venv "$environment"
grep '^uv==' requirements.txt >"$environment/uv.txt"
"$environment/bin/pip" install --quiet --disable-pip-version-check --require-hashes --requirement "$environment/uv.txt"
"$environment/bin/uv" pip install --quiet --system-certs --python "$environment/bin/python" \
    --constraint requirements.txt --editable '.[jobs]'

read -ra words <<<"$ARGUMENTS"
"$environment/bin/trainyard" images push "${words[@]}"
