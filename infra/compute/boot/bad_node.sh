#!/bin/bash
# Takes an instance away whose cards a job found bad: the job leaves a file on a volume of its own.
# As with a boot that fails, the instance powers off, and Batch, or the Auto Scaling group behind it, terminates it and
# starts another where one is needed: Batch has no way to keep a job from a node, and would give this one the next.
#
# BAD_NODE_FILE: the file's name
set -euo pipefail

until word=$(find /var/lib/docker/volumes -maxdepth 3 -name "$BAD_NODE_FILE" -print -quit 2>/dev/null) && [[ -n $word ]]; do
  sleep 5
done
echo "trainyard: a job found this node bad: $(head -c 500 "$word")"
# The agent first tells how the job ended: an end that it does not report is a reclaim to Batch.
sleep 10
systemctl mask --now --no-block ecs.service || true
systemctl poweroff --no-block
