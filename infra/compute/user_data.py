"""MIME multipart user data, made from the scripts in boot/: what an instance does at boot, before it accepts jobs.

Batch requires this format, because it appends its own part. Shell scripts run in cloud-init's last stage, before
the ECS agent starts; a boothook runs in an early stage, before Docker starts.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aws_cdk import aws_ec2 as ec2

from infra.compute.instance_role import TEAM_TAG
from jobs.core.instance_types import STOP_TIMEOUT_SECONDS, InstanceType
from jobs.spec.launcher_options import BAD_NODE_FILE

_AGENT_CONFIGURATION = {
    "ECS_CONTAINER_STOP_TIMEOUT": f"{STOP_TIMEOUT_SECONDS}s",  # the agent's default is 30 s
    # Off by default. Refuses new tasks after a Spot notice; boot/spot_notice.sh stops the running ones.
    "ECS_ENABLE_SPOT_INSTANCE_DRAINING": "true",
    # Containers of multi-node jobs have network interfaces, over which they would reach the instance's role.
    "ECS_AWSVPC_BLOCK_IMDS": "true",
    # The settings below are ecs-init's defaults on Amazon Linux; other AMIs start the agent without them. Batch runs
    # single-node jobs in the host's network, where the agent needs a separate switch to provide the job's role.
    "ECS_ENABLE_TASK_IAM_ROLE": "true",
    "ECS_ENABLE_TASK_IAM_ROLE_NETWORK_HOST": "true",
    "ECS_ENABLE_TASK_ENI": "true",
    "ECS_ENABLE_AWSLOGS_EXECUTIONROLE_OVERRIDE": "true",
    "ECS_AVAILABLE_LOGGING_DRIVERS": '["json-file","awslogs"]',
}

_SCRIPTS = Path(__file__).parent / "boot"
_BOOTHOOK = 'text/cloud-boothook; charset="utf-8"'


@dataclass(frozen=True, kw_only=True)
class FileSystem:
    """An FSx for Lustre file system, as clients mount it."""

    dns_name: str
    mount_name: str


def user_data(
    row: InstanceType,
    *,
    log_group_name: str,
    proxy: Mapping[str, str],
    team: str | None = None,
    file_system: FileSystem | None = None,
) -> str:
    """Return the user data of instances of `row`, which mount `file_system` if it is given.

    `log_group_name`: log group of boot logs. `proxy`: variables for the instance's services, empty without a proxy.
    `team`: the team whose jobs the instances run, or None if teams share them.
    """
    parts = ec2.MultipartUserData()
    if proxy:
        script = _script(*_lines("proxy", PROXY=proxy["HTTP_PROXY"], DIRECT=proxy["NO_PROXY"]))
        parts.add_part(ec2.MultipartBody.from_user_data(script, _BOOTHOOK))
    # AMIs that the stage builds set up the disks themselves.
    if row.nvme_disks and row.machine_image != "stage":
        parts.add_part(ec2.MultipartBody.from_user_data(_script(*_lines("instance_store")), _BOOTHOOK))
    # First, because later parts may fail; the boot does not wait for it.
    logs = _service("instance_logs", LOG_GROUP=log_group_name)
    parts.add_user_data_part(logs, ec2.MultipartBody.SHELL_SCRIPT)
    parts.add_user_data_part(_agent(team), ec2.MultipartBody.SHELL_SCRIPT, True)
    # Also on On-Demand instances, which never get a notice, so that all user data is the same.
    spot_notice = _service("spot_notice", STOP_TIMEOUT_SECONDS=str(STOP_TIMEOUT_SECONDS))
    parts.add_user_data_part(spot_notice, ec2.MultipartBody.SHELL_SCRIPT)
    # A job fills an instance of such a type, so terminating the instance ends no other job.
    if row.accelerators and row.nvme_disks:
        bad_node = _service("bad_node", BAD_NODE_FILE=BAD_NODE_FILE)
        parts.add_user_data_part(bad_node, ec2.MultipartBody.SHELL_SCRIPT)
    if row.huge_pages:
        parts.add_user_data_part(
            _required("huge_pages", *_lines("huge_pages", HUGE_PAGES=str(row.huge_pages))),
            ec2.MultipartBody.SHELL_SCRIPT,
        )
    if file_system:
        source = f"{file_system.dns_name}@tcp:/{file_system.mount_name}"
        parts.add_user_data_part(
            _required("lustre", *_lines("lustre", LUSTRE_SOURCE=source)), ec2.MultipartBody.SHELL_SCRIPT
        )
    return parts.render()


def _agent(team: str | None) -> ec2.UserData:
    # Container instances do not inherit their instance's tags. infra/compute/instance_role.py uses this tag.
    tags = {"ECS_CONTAINER_INSTANCE_TAGS": json.dumps({TEAM_TAG: team}, separators=(",", ":"))} if team else {}
    values = (f"{name}={value}" for name, value in {**_AGENT_CONFIGURATION, **tags}.items())
    return _required(
        "ecs.config", "mkdir -p /etc/ecs", "cat >>/etc/ecs/ecs.config <<'CONFIGURATION'", *values, "CONFIGURATION"
    )


def _service(name: str, **variables: str) -> ec2.UserData:
    """Return a script that installs a script of boot/ as a systemd service, which also starts after a reboot."""
    program = f"/usr/local/sbin/trainyard-{name.replace('_', '-')}"
    unit = f"{Path(program).name}.service"
    return _script(
        "set -euo pipefail",
        *(f"cat >{program} <<'PROGRAM'", "#!/bin/bash"),
        *(*_lines(name, **variables), "PROGRAM"),
        *(f"chmod 0755 {program}", f"cat >/etc/systemd/system/{unit} <<'UNIT'"),
        *(*(_SCRIPTS / f"{name}.service").read_text().splitlines(), "UNIT"),
        # --no-block: systemd may be busy with units that wait for the end of user data.
        *("systemctl daemon-reload", f"systemctl enable {unit}", f"systemctl start --no-block {unit}"),
    )


def _required(part: str, *lines: str) -> ec2.UserData:
    """Return a script that must succeed before the instance accepts jobs. Otherwise the instance shuts down."""
    return _script(*_lines("required", PART=part), *lines)


def _script(*lines: str) -> ec2.UserData:
    script = ec2.UserData.for_linux()
    script.add_commands(*lines)
    return script


def _lines(name: str, **variables: str) -> list[str]:
    """Return the lines of a script of boot/, preceded by the variables it reads.

    Comments are dropped: EC2 allows 16 KiB of user data, and Batch adds to it.
    """
    lines = (_SCRIPTS / f"{name}.sh").read_text().splitlines()
    return [
        *(f"{variable}='{value}'" for variable, value in variables.items()),
        *(line for line in lines if line and not line.lstrip().startswith("#")),
    ]
