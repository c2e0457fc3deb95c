# `trainyard images push` in CodeBuild, in the root of the source; see image_build.py for what it is given.
set -euo pipefail

# What is installed is what requirements.txt pins. Editable: images are built from this folder.
environment="$(mktemp --directory)"
python3 -m venv "$environment"
"$environment/bin/pip" install --quiet --disable-pip-version-check --constraint requirements.txt --editable '.[jobs]'

read -ra words <<<"$ARGUMENTS"
"$environment/bin/trainyard" images push "${words[@]}"
