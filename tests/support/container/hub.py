"""A data set as on the Hugging Face Hub: JSON lines, and a card with configurations and features.

`datasets` reads a folder `org/name` below the working directory like the repository of that name on the hub.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support.container.reviews import write_jsonl

Splits = Mapping[str, Sequence[dict[str, Any]]]


def save_data_set(folder: Path, configurations: Mapping[str, Splits], *, class_names: Sequence[str] | None) -> None:
    """Save configurations with their splits. `idx` is a number, and `label` a class label if it has names."""
    types: dict[str, Any] = {"idx": "int32"}
    if class_names is not None:
        types["label"] = {"class_label": {"names": {str(number): name for number, name in enumerate(class_names)}}}
    files, infos = [], []
    for configuration, splits in configurations.items():
        (folder / configuration).mkdir(parents=True)
        for split, rows in splits.items():
            write_jsonl(folder / configuration / f"{split}.jsonl", rows)
        columns = list(next(iter(splits.values()))[0])
        data_files = [{"split": split, "path": f"{configuration}/{split}.jsonl"} for split in splits]
        files.append({"config_name": configuration, "data_files": data_files})
        features = [{"name": column, "dtype": types.get(column, "string")} for column in columns]
        infos.append({"config_name": configuration, "features": features})
    card = yaml.safe_dump({"configs": files, "dataset_info": infos}, sort_keys=False)
    (folder / "README.md").write_text(f"---\n{card}---\n")
