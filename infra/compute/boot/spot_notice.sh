#!/bin/bash
# Stops jobs gracefully when EC2 reclaims the Spot instance. Polls for the notice every 5 s, as EC2's guide recommends; EC2
# sends it about two minutes before the instance ends.
#
# At the notice, the ECS agent refuses new tasks, but stops only tasks of services, and Batch jobs are not. Jobs whose image
# is still being pulled are left alone, because they have done nothing yet.
#
# STOP_TIMEOUT_SECONDS: time from SIGTERM to SIGKILL; extended until LAST_SECONDS before the time in the notice
set -euo pipefail
metadata=http://169.254.169.254/latest

readonly LAST_SECONDS=2 LONGEST_SECONDS=118

query() {
  curl --silent --fail --noproxy '*' --max-time 3 "$@"
}

# A new token per request, so none expires. Passed on standard input, because everyone can read the process list.
has_notice() {
  local token
  token=$(query --request PUT --header 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$metadata/api/token") &&
    notice=$(query --header @- "$metadata/meta-data/spot/instance-action" <<<"X-aws-ec2-metadata-token: $token")
}

until has_notice; do # 404 until then
  sleep 5
done
echo "trainyard: Spot notice $notice"

# A training job uses all of this time. The limits hold even if the clock is wrong.
seconds=$STOP_TIMEOUT_SECONDS
if end=$(date --date "$(sed -n 's/.*"time": *"\([^"]*\)".*/\1/p' <<<"$notice")" +%s); then
  left=$((end - $(date +%s) - LAST_SECONDS))
  ((left <= LONGEST_SECONDS)) || left=$LONGEST_SECONDS
  ((left <= seconds)) || seconds=$left
fi

# Task containers have these labels, the agent's container does not. Internal containers hold a task's network; the agent
# stops them after the job. If Docker does not answer, the script fails and systemd restarts it.
running=$(docker ps --filter label=com.amazonaws.ecs.task-arn \
  --format '{{.ID}} {{.Label "com.amazonaws.ecs.container-name"}}')
mapfile -t jobs < <(sed '/^$/d; / ~internal~/d; s/ .*//' <<<"$running")
if ((${#jobs[@]} == 0)); then
  echo "trainyard: no running jobs"
  exit 0
fi
echo "trainyard: SIGTERM to ${jobs[*]}, SIGKILL in $seconds s"
# All at once, and only once: to a job that is shutting down, a second signal would mean to stop immediately.
docker stop -t "$seconds" "${jobs[@]}" || echo "trainyard: could not stop all jobs"
echo "trainyard: done"
