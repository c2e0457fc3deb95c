"""jobs/specs/image-classification with a small model and pictures of two colours."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from transformers import AutoModelForImageClassification, ViTConfig, ViTModel

from jobs.runs.spec_file import READY_SPECS, read_spec
from tests.support.container.launching import Run
from tests.support.container.scripts import script_flags

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

PROCESSOR = '{"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}'


def test_pictures_are_classified(run: Run, s3: "S3Client", tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for name, colour in {"blue": (30, 30, 220), "red": (220, 30, 30)}.items():
        folder = tmp_path / "pictures" / name
        folder.mkdir(parents=True)
        for number in range(40):
            noisy = np.clip(np.array(colour) + draw.integers(-25, 25, (20, 20, 3)), 0, 255)
            Image.fromarray(noisy.astype(np.uint8)).save(folder / f"{number}.png")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    ViTModel(ViTConfig(image_size=16, patch_size=8, **sizes)).save_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text(PROCESSOR)
    spec = read_spec(READY_SPECS / "image-classification.yaml")
    inputs = {"model": str(tmp_path / "vit"), "pictures": str(tmp_path / "pictures")}
    command = f"{spec.arguments['command']} --learning-rate 0.002 --batch-size 8"

    run.attempt(*script_flags(s3, READY_SPECS / "image-classification", command, inputs=inputs), kind="script")

    result = run.receipt().result
    assert (result["eval_accuracy"], result["classes"]) == (1.0, 2)
    model = AutoModelForImageClassification.from_pretrained(run.download("output/model/", tmp_path / "model"))
    assert model.config.id2label == {0: "blue", 1: "red"}
