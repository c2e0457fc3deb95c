#!/bin/bash
# Reserves 2 MiB pages for the transfers of the accelerator's driver.
#
# HUGE_PAGES: number of pages
set -euo pipefail
echo "vm.nr_hugepages=$HUGE_PAGES" >/etc/sysctl.d/60-hugepages.conf
sysctl --quiet --load=/etc/sysctl.d/60-hugepages.conf
# The kernel reserves as many as fit and reports success.
pages=$(sysctl --values vm.nr_hugepages)
if ((pages < HUGE_PAGES)); then
  echo "trainyard: $pages huge pages instead of $HUGE_PAGES" >&2
  exit 1
fi
