"""`python -m infra.amis` records AMIs, returns to earlier ones, and a deployment takes no other."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra import amis
from infra.stages import Stage, Team
from infra.stages import amis as record
from jobs.core.errors import ConfigurationError, UsageError
from tests.support.infra.instances import environments, launch_data
from tests.support.infra.synthesis import up_to
from tests.support.running_emulator import Emulator, environment_of

STAGE = Stage(
    name="recorded",
    teams=(Team(name="research", shares_instances=True),),
    instance_types=("g5.4xlarge",),
    machine_image="ssm:/recorded/gpu",
)
GPU, CPU = "g5-4xlarge-cuda-2026-11", "cpu-m6i-4xlarge"


@pytest.fixture(autouse=True)
def own_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "amis.json"
    path.write_text("{}\n")
    monkeypatch.setattr(record, "RECORD", path)
    return path


def test_the_record_moves_on_and_back(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment_of(emulator.endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(amis, "selected_stages", lambda _: (STAGE,))
    ec2, ssm = emulator.client("ec2"), emulator.client("ssm")

    def publish(name: str) -> str:
        """Publish a newer AMI in the parameter that the settings name."""
        ami: str = ec2.register_image(Name=name)["ImageId"]
        ssm.put_parameter(Name="/recorded/gpu", Value=ami, Type="String", Overwrite=True)
        return ami

    def run(*arguments: str) -> dict[str, Any]:
        assert amis.main([*arguments, "--stage", "recorded", "-o", "json"]) == 0
        return {row["pool"]: next(iter(row["recorded"]), "") for row in json.loads(capsys.readouterr().out)}

    first = publish("first")
    assert run("list") == {GPU: "", CPU: ""}
    recorded = run("update")
    assert recorded[GPU] == first
    assert recorded[CPU].startswith("ami-")
    # A newer AMI changes nothing by itself, and only the chosen pool moves.
    second = publish("second")
    assert run("list") == recorded
    assert run("update", "--pool", CPU) == {CPU: recorded[CPU]}
    assert run("update") == {**recorded, GPU: second}
    assert run("rollback") == recorded
    with pytest.raises(UsageError, match="no earlier AMI"):
        run("rollback")
    with pytest.raises(UsageError, match="no pool 'cpu'"):
        run("list", "--pool", "cpu")
    # An AMI that was deregistered would keep instances from starting.
    run("update")
    ec2.deregister_image(ImageId=first)
    with pytest.raises(ConfigurationError, match=f"{first} cannot be seen"):
        run("rollback")


def test_recorded_amis_are_in_the_template(own_record: Path) -> None:
    gpu, cpu = "ami-0123456789abcdef0", "ami-0123456789abcdef1"
    own_record.write_text(json.dumps({"recorded": {"/recorded/gpu": [gpu], "/recorded/cpu": [cpu]}}))
    row = replace(STAGE, cpu_machine_image="ssm:/recorded/cpu", cpu_root_device_name="/dev/sda1")
    compute = up_to("compute", row)["compute"]
    for pool, ami, device in ((GPU, gpu, "/dev/sda1"), (CPU, cpu, "/dev/sda1")):
        (configuration,) = environments(compute)[f"{pool}-spot"]["Ec2Configuration"]
        assert configuration["ImageIdOverride"] == ami
        assert launch_data(compute, f"{pool}-spot")["BlockDeviceMappings"][0]["DeviceName"] == device
    # The settings name other parameters now: their AMIs are not recorded.
    other = up_to("compute", replace(row, machine_image="ssm:/other", cpu_machine_image=None))["compute"]
    names = {parameter.get("Default") for parameter in other["Parameters"].values()}
    assert {"/other", "/aws/service/ecs/optimized-ami/amazon-linux-2023/recommended/image_id"} <= names


def test_a_broken_record_is_refused(own_record: Path) -> None:
    own_record.write_text('{"dev": ["ami-1"]}')
    with pytest.raises(ConfigurationError, match=r"infra/amis\.json is not a record"):
        record.read_record()
