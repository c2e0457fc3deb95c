#!/bin/bash
# Mounts the stage's file system, the shared part of the data bucket, read-only at /fsx.
#
# LUSTRE_SOURCE: <DNS name>@tcp:/<mount name>
set -euo pipefail
# Amazon Linux has the client in its repository; AMIs of other distributions must include it.
command -v mount.lustre >/dev/null || dnf install --assumeyes --quiet lustre-client
mkdir -p /fsx
for pause in 5 10 20 40 0; do
  mountpoint --quiet /fsx && break
  mount -t lustre -o ro,noatime,flock "$LUSTRE_SOURCE" /fsx && break
  sleep "$pause"
done
if ! mountpoint --quiet /fsx; then
  echo "trainyard: cannot mount $LUSTRE_SOURCE at /fsx" >&2
  exit 1
fi
