#!/bin/bash
# Mounts the stage's file system at /fsx: what all teams share of the data bucket, for reading only.
#
# LUSTRE_SOURCE: <DNS name>@tcp:/<mount name>
set -euo pipefail
# Amazon Linux has the client in its own repository; an AMI of another distribution has to bring it along.
command -v mount.lustre >/dev/null || dnf install --assumeyes --quiet lustre-client
mkdir -p /fsx
for pause in 5 10 20 40 0; do
  mountpoint --quiet /fsx && break
  mount -t lustre -o ro,noatime,flock "$LUSTRE_SOURCE" /fsx && break
  sleep "$pause"
done
if ! mountpoint --quiet /fsx; then
  echo "trainyard: $LUSTRE_SOURCE could not be mounted at /fsx" >&2
  exit 1
fi
