#!/bin/bash
# Header of scripts that jobs depend on: if the script fails, the instance takes no jobs and shuts down. Otherwise the ECS
# agent, which starts after user data even if that fails, would accept one job after another that must fail.
#
# The instance powers off, and Batch or its Auto Scaling group terminates it and starts another. Terminating itself would
# need a permission on instances, which jobs on the instance could use.
#
# PART: name of the script, for the log
set -euo pipefail

leave_unless_done() {
  local code=$?
  if ((code)); then
    echo "trainyard: $PART failed with exit code $code; this instance accepts no jobs and shuts down" >&2
    # Stop every agent: one that waits for this script, one that the AMI started early, or one after a reboot.
    systemctl mask --now --no-block ecs.service || true
    # Wait until boot/instance_logs.sh, which may still be starting, has sent the output so far.
    for _ in {1..30}; do
      [[ $(systemctl is-active trainyard-instance-logs.service) == activating ]] || break
      sleep 2
    done
    sleep 10
    systemctl poweroff --no-block
  fi
}
trap leave_unless_done EXIT
