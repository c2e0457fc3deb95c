#!/bin/bash
# Sets 2 MiB pages aside that the accelerator's driver takes for its transfers.
#
# HUGE_PAGES: how many
set -euo pipefail
echo "vm.nr_hugepages=$HUGE_PAGES" >/etc/sysctl.d/60-hugepages.conf
sysctl --quiet --load=/etc/sysctl.d/60-hugepages.conf
# The kernel gives as many as it finds room for, and calls that a success.
pages=$(sysctl --values vm.nr_hugepages)
if ((pages < HUGE_PAGES)); then
  echo "trainyard: $pages huge pages instead of $HUGE_PAGES" >&2
  exit 1
fi
