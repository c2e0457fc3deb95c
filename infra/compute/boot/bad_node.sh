#!/bin/bash
# Removes an instance whose accelerators a job found bad. The job reports it by writing a file to its volume.
# As after a failed boot, the instance powers off, and Batch or its Auto Scaling group terminates it and starts another if
# needed. Batch cannot keep jobs away from a node, and would give this one the next job.
#
# BAD_NODE_FILE: name of the file
set -euo pipefail

until word=$(find /var/lib/docker/volumes -maxdepth 3 -name "$BAD_NODE_FILE" -print -quit 2>/dev/null) && [[ -n $word ]]; do
  sleep 5
done
echo "trainyard: a job found this node bad: $(head -c 500 "$word")"
# Let the agent report how the job ended: without a report, Batch takes the end for a reclaim.
sleep 10
systemctl mask --now --no-block ecs.service || true
systemctl poweroff --no-block
