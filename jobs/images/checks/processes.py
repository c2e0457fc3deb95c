"""Checks of what runs in an image: the launcher, ranks that train, and what its children add."""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from docker.types import DeviceRequest

from jobs.contract.errors import INTERRUPTED_EXIT_CODE
from jobs.contract.instance_types import INSTANCE_TYPES, SCRATCH
from jobs.images.checks import container
from jobs.images.checks.check import CheckFailedError, LeftOut, Subject

_PORT = 9000
"""On the container's own loopback, where nothing else listens."""

_STOP_SECONDS = 20
"""Seconds that a stop may take, of the 30 that AWS leaves a container after SIGTERM."""

_TRAINING_SECONDS = 600
"""For what takes 20 to 60 s on two idle cores."""

ACCELERATORS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "gaudi": ("hpu", "habana", {"runtime": "habana", "ipc_mode": "host"}),
    "cuda": (
        "cuda",
        "nvidia",
        {"device_requests": [DeviceRequest(count=-1, capabilities=[["gpu"]])], "ipc_mode": "host"},
    ),
}
"""Root to: its accelerator, the engine's runtime that hands it in, and what Batch asks for beside the image."""


def command(subject: Subject) -> str:
    if entrypoint := subject.configuration.get("Entrypoint"):
        raise CheckFailedError(f"it has an ENTRYPOINT, {entrypoint}: a job definition names the whole command")
    output = container.run(subject)
    if "jobs.train.launch" not in output or "job kinds" not in output:
        raise CheckFailedError(f"{output}\nits own command is not the help of jobs.train.launch")
    return " ".join(subject.configuration["Cmd"])


def sigterm(subject: Subject) -> str:
    """Check that SIGTERM to the init process ends a launcher that waits for an answer of S3, as interrupted."""
    instance = next((row.name for row in INSTANCE_TYPES.values() if row.image == subject.image.root), None)
    if instance is None:
        raise LeftOut(f"no row of jobs/contract/instance_types.py runs images of '{subject.image.root}'")
    launch = (
        f"python -m jobs.train.launch --instance-type={instance} --nproc-per-node=1 finetune-classification "
        "--model=s3://bucket/model --train-data=s3://bucket/train.jsonl"
    )
    environment = {
        "TRAINYARD_RUN_URI": "s3://bucket/team/run/",
        "TRAINYARD_ACCELERATOR": "cpu",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{_PORT}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    script = f"{container.FOLDER}/silent_server.py"
    with container.started(
        subject, ["sh", "-c", f"python {script} {_PORT} & exec {launch}"], environment=environment
    ) as started:
        with closing(started.logs(stream=True, follow=True)) as lines:
            asked = any(b"asked" in line for line in lines)
        if not asked:
            raise CheckFailedError(f"{container.output_of(started)}\nthe launcher ended before it asked for its run")
        started.kill(signal="SIGTERM")
        code = container.exit_code(started, timeout_seconds=_STOP_SECONDS)
        output = container.output_of(started)
    if code != INTERRUPTED_EXIT_CODE or "interrupted" not in output:
        raise CheckFailedError(f"{output}\nexit code {code} after SIGTERM, not {INTERRUPTED_EXIT_CODE}")
    return f"exit code {code}: {container.last_line(output)}"


def two_ranks(subject: Subject) -> str:
    return container.last_line(container.run_script(subject, "two_ranks.py", "cpu", timeout_seconds=_TRAINING_SECONDS))


EFA_PLACE = "/opt/trainyard/efa"
"""What images/shared/install-efa leaves in an image that has EFA: its content names the installer."""


def on_its_accelerator(subject: Subject) -> str:
    name, runtime, options = ACCELERATORS[subject.image.root]
    if runtime not in subject.client.info()["Runtimes"]:
        raise LeftOut(f"the Docker engine has no runtime '{runtime}': a container finds no {name.upper()} device")
    output = container.run_script(
        subject, "two_ranks.py", name, timeout_seconds=_TRAINING_SECONDS, cap_drop=None, **options
    )
    return container.last_line(output)


def scratch(subject: Subject) -> str:
    """Check that the image's user can write to the volume that a job definition puts at /scratch."""
    script = f"touch {SCRATCH}/written && stat --format '%a, of user %u' {SCRATCH}"
    return container.last_line(container.run(subject, ["sh", "-c", script], volumes=[SCRATCH]))


def libfabric(subject: Subject) -> str:
    """Check that what HCCL, or NCCL over EFA, reaches other nodes with can be loaded, and finds a provider."""
    name = "hpu" if subject.image.root == "gaudi" else "cuda"
    code = (
        "import pathlib; from jobs.train import libfabric as fabric; "
        f"left_out = {name!r} == 'cuda' and not pathlib.Path({EFA_PLACE!r}).exists(); "
        f"print('left out') if left_out else print('providers', *fabric.providers(fabric.load_for({name!r})))"
    )
    found = container.last_line(container.run(subject, ["python", "-c", code]))
    if found == "left out":
        raise LeftOut("it was built without EFA (EFA_MIRROR was empty): NCCL talks to other nodes over TCP")
    return found


def notebook(subject: Subject) -> str:
    return container.last_line(container.run_script(subject, "notebook_server.py", timeout_seconds=_TRAINING_SECONDS))
