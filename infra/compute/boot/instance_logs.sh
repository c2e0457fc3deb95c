#!/bin/bash
# Sends the logs of the boot and the ECS agent to CloudWatch, in streams named <instance id>/<log>. Otherwise they would be
# lost with an instance that fails to boot or never joins its cluster.
#
# Jobs do not need this: without the CloudWatch agent, the logs stay on the instance and jobs run as usual.
#
# LOG_GROUP: name of the log group
set -euo pipefail
control=/opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl
if [[ ! -x $control ]]; then
  # Amazon Linux has the agent in its repository; AMIs of other distributions must include it.
  if ! command -v dnf >/dev/null; then
    echo "trainyard: this AMI has no CloudWatch agent; boot and ECS agent logs stay on the instance"
    exit 0
  fi
  dnf install --assumeyes --quiet amazon-cloudwatch-agent
fi
# The agent replaces {instance_id} with the id that EC2 reports.
entries=()
for log in cloud-init-output.log ecs/ecs-init.log ecs/ecs-agent.log; do
  name=${log##*/}
  entries+=("{\"file_path\": \"/var/log/$log\", \"log_group_name\": \"$LOG_GROUP\", \"log_stream_name\": \"{instance_id}/${name%.log}\"}")
done
list=$(IFS=,; echo "${entries[*]}")
echo "{\"agent\": {\"run_as_user\": \"root\"}, \"logs\": {\"logs_collected\": {\"files\": {\"collect_list\": [$list]}}}}" \
  >/etc/trainyard-logs.json
"$control" -a fetch-config -m ec2 -s -c file:/etc/trainyard-logs.json
echo "trainyard: sending boot and ECS agent logs to $LOG_GROUP"
