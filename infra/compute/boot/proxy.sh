#!/bin/bash
# Makes the services of the instance use the stage's proxy: Docker, the ECS, SSM and CloudWatch agents, and the scripts of
# user data.
#
# This is a boothook: it runs at every boot, before those services start, because systemd forgets these variables.
#
# PROXY: URL of the proxy
# DIRECT: what to reach directly, separated by commas
set -euo pipefail
systemctl set-environment {HTTP,HTTPS}_PROXY="$PROXY" {http,https}_proxy="$PROXY" {NO_PROXY,no_proxy}="$DIRECT"
# The agent's container does not inherit them, and must reach Docker (Amazon ECS developer guide, "Using an HTTP proxy for
# Amazon ECS Linux container instances").
mkdir -p /etc/ecs
if ! grep --quiet --no-messages '^HTTPS_PROXY=' /etc/ecs/ecs.config; then
  printf '%s\n' {HTTP,HTTPS}_PROXY="$PROXY" NO_PROXY="$DIRECT,/var/run/docker.sock" >>/etc/ecs/ecs.config
fi
# For other boothooks, whose environment is older.
if [[ -f /etc/dnf/dnf.conf ]] && ! grep --quiet '^proxy=' /etc/dnf/dnf.conf; then
  echo "proxy=$PROXY" >>/etc/dnf/dnf.conf
fi
