#!/bin/bash
# Sets 2 MiB pages aside that the accelerator's driver takes for its transfers.
#
# HUGE_PAGES: how many
set -euo pipefail
echo "vm.nr_hugepages=$HUGE_PAGES" >/etc/sysctl.d/60-hugepages.conf
sysctl --quiet --load=/etc/sysctl.d/60-hugepages.conf
