#!/bin/bash
# Shuts down the instance if a job finds its accelerators bad and writes a report to its volume. Batch or the Auto Scaling
# group then terminates the instance, and starts another if needed. Otherwise Batch, which cannot exclude a node, would give
# this node the next job.
#
# BAD_NODE_FILE: name of the report
set -euo pipefail

until report=$(find /var/lib/docker/volumes -maxdepth 3 -name "$BAD_NODE_FILE" -print -quit 2>/dev/null) && [[ -n $report ]]; do
  sleep 5
done
echo "trainyard: a job found this node bad: $(head -c 500 "$report")"
# Give the agent time to report how the job ended. Otherwise Batch counts a reclaim.
sleep 10
systemctl mask --now --no-block ecs.service || true
systemctl poweroff --no-block
