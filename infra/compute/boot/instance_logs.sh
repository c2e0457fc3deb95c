#!/bin/bash
# Sends the logs of the boot and of the ECS agent to CloudWatch: an instance that never joins its cluster, or whose boot
# fails, takes them with it when it ends. Streams are called <instance id>/<log>.
#
# Jobs need none of it: where the CloudWatch agent cannot be had, the logs stay on the instance and jobs run all the same.
#
# LOG_GROUP: where they go
set -euo pipefail
control=/opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl
if [[ ! -x $control ]]; then
  # Amazon Linux has it in its own repository; an AMI of another distribution has to bring it along.
  if ! command -v dnf >/dev/null; then
    echo "trainyard: this AMI has no CloudWatch agent; logs of boot and agent stay on the instance"
    exit 0
  fi
  dnf install --assumeyes --quiet amazon-cloudwatch-agent
fi
# The agent writes the instance's id, which it asks EC2 for, in place of {instance_id}.
entries=()
for log in cloud-init-output.log ecs/ecs-init.log ecs/ecs-agent.log; do
  name=${log##*/}
  entries+=("{\"file_path\": \"/var/log/$log\", \"log_group_name\": \"$LOG_GROUP\", \"log_stream_name\": \"{instance_id}/${name%.log}\"}")
done
list=$(IFS=,; echo "${entries[*]}")
echo "{\"agent\": {\"run_as_user\": \"root\"}, \"logs\": {\"logs_collected\": {\"files\": {\"collect_list\": [$list]}}}}" \
  >/etc/trainyard-logs.json
"$control" -a fetch-config -m ec2 -s -c file:/etc/trainyard-logs.json
echo "trainyard: logs of boot and agent go to $LOG_GROUP"
