#!/bin/bash
# Stops jobs gently when EC2 takes a Spot instance away: asks for the notice every 5 s, as EC2's guide says, until it
# comes, about two minutes before the end.
#
# Draining, which the ECS agent does at the notice, only keeps new tasks away: it stops the tasks of services, and jobs
# of Batch are none. An image that is still being pulled is left alone; its job has done nothing yet.
#
# STOP_TIMEOUT_SECONDS: from SIGTERM to SIGKILL, or longer, until LAST_SECONDS before the time that the notice names
set -euo pipefail
metadata=http://169.254.169.254/latest

readonly LAST_SECONDS=2 LONGEST_SECONDS=118

ask() {
  curl --silent --fail --noproxy '*' --max-time 3 "$@"
}

# A token for each question: none can expire. On standard input, since everybody can read the list of processes.
notice_has_come() {
  local token
  token=$(ask --request PUT --header 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$metadata/api/token") &&
    notice=$(ask --header @- "$metadata/meta-data/spot/instance-action" <<<"X-aws-ec2-metadata-token: $token")
}

until notice_has_come; do # 404 until then
  sleep 5
done
echo "trainyard: Spot notice $notice"

# A job that trains uses all of the time. A clock that is wrong changes little.
seconds=$STOP_TIMEOUT_SECONDS
if end=$(date --date "$(sed -n 's/.*"time": *"\([^"]*\)".*/\1/p' <<<"$notice")" +%s); then
  left=$((end - $(date +%s) - LAST_SECONDS))
  ((left <= LONGEST_SECONDS)) || left=$LONGEST_SECONDS
  ((left <= seconds)) || seconds=$left
fi

# Containers of tasks carry these labels, the agent's own does not. Internal ones hold a task's network; they are the
# agent's to stop, after the job. Without Docker's answer this ends, and systemd starts it again.
running=$(docker ps --filter label=com.amazonaws.ecs.task-arn \
  --format '{{.ID}} {{.Label "com.amazonaws.ecs.container-name"}}')
mapfile -t jobs < <(sed '/^$/d; / ~internal~/d; s/ .*//' <<<"$running")
if ((${#jobs[@]} == 0)); then
  echo "trainyard: no job runs here"
  exit 0
fi
echo "trainyard: SIGTERM to ${jobs[*]}, SIGKILL in $seconds s"
# All at once; never a second time, which a job that ends in order would take for impatience.
docker stop -t "$seconds" "${jobs[@]}" || echo "trainyard: not all could be stopped"
echo "trainyard: done"
