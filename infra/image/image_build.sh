# `trainyard images push` in CodeBuild, in the root of the source; see image_build.py for what it is given.
set -euo pipefail

# What is installed is what requirements.txt pins. Editable, since images are built from this folder; uv, since pip takes
# no folder beside packages whose hashes it checks.
environment="$(mktemp --directory)"
python3 -m venv "$environment"
grep '^uv==' requirements.txt >"$environment/uv.txt"
"$environment/bin/pip" install --quiet --disable-pip-version-check --require-hashes --requirement "$environment/uv.txt"
"$environment/bin/uv" pip install --quiet --system-certs --python "$environment/bin/python" \
    --constraint requirements.txt --editable '.[jobs]'

read -ra words <<<"$ARGUMENTS"
"$environment/bin/trainyard" images push "${words[@]}"
