#!/bin/bash
# Stands before a script that jobs cannot do without: where it fails, the instance takes none and goes. The ECS agent
# starts after user data whether that succeeds or not, and would be given one job after the other to fail.
#
# It powers off, and Batch, or the Auto Scaling group behind it, terminates it and starts another. To terminate itself
# it would need a right over instances, which jobs on it could use.
#
# PART: the script's name, for the log
set -euo pipefail

leave_unless_done() {
  local code=$?
  if ((code)); then
    echo "trainyard: $PART failed with $code; this instance takes no jobs and shuts down" >&2
    # Whatever starts next: an agent that waits for this to end, one that an AMI started early, one after a reboot.
    systemctl mask --now --no-block ecs.service || true
    # What has been said so far leaves by way of boot/instance_logs.sh, which may still be getting ready.
    for _ in {1..30}; do
      [[ $(systemctl is-active trainyard-instance-logs.service) == activating ]] || break
      sleep 2
    done
    sleep 10
    systemctl poweroff --no-block
  fi
}
trap leave_unless_done EXIT
