"""Where each pool's AMI comes from, and which AMIs infra/amis.json records, so that only an edit of it changes them.

The record maps each stage to its sources, and each source to its AMIs, the current one first. `python -m infra.amis`
edits it.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from infra.stages.model import Pool, Stage
from jobs.core.errors import ConfigurationError
from jobs.core.instance_types import ImageType

RECORD = Path(__file__).parents[1] / "amis.json"

Record = dict[str, dict[str, list[str]]]

_ECS_PARAMETERS: Mapping[ImageType, str] = {
    "ECS_AL2023": "/aws/service/ecs/optimized-ami/amazon-linux-2023/recommended/image_id",
    "ECS_AL2023_NVIDIA": "/aws/service/ecs/optimized-ami/amazon-linux-2023/gpu/recommended/image_id",
}
"""Public parameters with each family's latest AMI (Amazon ECS guide, Retrieving ECS-optimized Linux AMI metadata)."""


def machine_image_parameter(stage: Stage, pool: Pool) -> str:
    """Return the name of the SSM parameter with the id of the latest AMI that a stage built for a pool.

    It is below /imagebuilder/, the only place that Image Builder's service-linked role may write to (AWS's policy
    AWSServiceRoleForImageBuilder).
    """
    return f"/imagebuilder/trainyard-{stage.name}/machine-image/{pool.id}"


def ami_sources(stage: Stage) -> dict[str, str]:
    """Return each pool's source by pool id: the id of an AMI, or the name of the SSM parameter with the newest one."""
    found = {
        pool.id: pool.machine_image
        or (machine_image_parameter(stage, pool) if pool.builds_machine_image else _ECS_PARAMETERS[pool.row.image_type])
        for pool in stage.pools
    }
    found[stage.cpu_pool_id] = stage.cpu_machine_image or _ECS_PARAMETERS[stage.cpu_row.image_type]
    return {pool: source.removeprefix("ssm:") for pool, source in found.items()}


def is_ami(source: str) -> bool:
    """Return whether a source is an AMI's id, which no deployment and no record changes."""
    return source.startswith("ami-")


def read_record() -> Record:
    """Return the recorded AMIs by stage and source. Raises ConfigurationError if the file is not valid."""
    try:
        return TypeAdapter(Record).validate_json(RECORD.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigurationError(
            f"infra/amis.json is not a record of AMIs: {str(error).splitlines()[0]}",
            next_step="git checkout infra/amis.json, and change it only with python -m infra.amis",
        ) from None


def write_record(record: Record) -> None:
    RECORD.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


def recorded_ami(stage: Stage, source: str) -> str | None:
    """Return the recorded AMI of a source, or None if each deployment takes the newest one."""
    return next(iter(read_record().get(stage.name, {}).get(source, [])), None)
