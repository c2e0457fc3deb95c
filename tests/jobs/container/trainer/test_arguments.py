"""A custom gaudi_config.json: where it is found, and which contents are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jobs.container.trainer.arguments import read_gaudi_config
from jobs.core.errors import NotFoundError, TrainyardError, UsageError

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

PUBLISHED = {"use_fused_adam": True, "use_fused_clip_norm": True, "use_torch_autocast": True}


def test_gaudi_config_is_read_from_a_file_or_folder(
    s3: "S3Client", put: Callable[[Path, str], str], tmp_path: Path
) -> None:
    (tmp_path / "gaudi_config.json").write_text(json.dumps({**PUBLISHED, "optimum_version": "1.18.1"}))
    own = tmp_path / "mine.json"
    own.write_text('{"autocast_bf16_ops": ["linear"], "autocast_fp32_ops": null}')
    folder = put(tmp_path, f"gaudi/{tmp_path.name}")
    for location in (str(tmp_path), str(tmp_path / "gaudi_config.json"), folder, f"{folder}/gaudi_config.json"):
        assert read_gaudi_config(location, s3) == PUBLISHED, location
    assert read_gaudi_config(f"{folder}/mine.json", s3) == {"autocast_bf16_ops": ["linear"], "autocast_fp32_ops": None}


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (None, NotFoundError, "there is no gaudi_config.json at"),
        ("{", UsageError, "is not JSON"),
        ("[]", UsageError, "is not a JSON object"),
        ('{"use_fused_adm": true}', UsageError, "unknown key 'use_fused_adm'; did you mean 'use_fused_adam'"),
        ('{"use_torch_autocast": 1}', UsageError, "use_torch_autocast is 1, not true or false"),
        ('{"autocast_bf16_ops": "mm"}', UsageError, "autocast_bf16_ops is 'mm', not a list of operators"),
    ],
    ids=str,
)
def test_invalid_gaudi_config_is_refused(
    content: str | None, kind: type[TrainyardError], message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "gaudi_config.json").write_text(content)
    with pytest.raises(kind, match=message) as told:
        read_gaudi_config(str(tmp_path), None)
    assert "Next: " in str(told.value)
