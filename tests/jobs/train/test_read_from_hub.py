"""What runs have pushed to the hub, and models there, as the inputs of others, in a process that asks a hub."""

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.contract.locations import S3Location
from jobs.contract.run import MANIFEST
from jobs.train.data.packed_tokens import INDEX, Index
from tests.support.train.hub_server import Hub
from tests.support.train.packing import publish

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

READ = """
import json, sys
from pathlib import Path
from jobs.contract.errors import TrainyardError
from jobs.kinds.pretrain_mlm import PretrainMlm
from jobs.train import gaudi_config
from jobs.train.data.artifacts import open_artifact
from jobs.train.data.tokenizer_files import tokenizer_files
from jobs.train.kinds.pretrain_mlm import fetch_inputs
scratch = Path("scratch")
scratch.mkdir()
arguments = PretrainMlm(data="hf://acme/tokens", config="hf://acme/bert", global_batch_size=8)
inputs = fetch_inputs(arguments, None, scratch)
tokenizer = tokenizer_files("hf://acme/bert", s3=lambda: None, scratch=scratch)
found = {
    "fingerprint": inputs.fingerprint,
    "config": inputs.config,
    "tokenizer": {name: (tokenizer.folder / name).read_text() for name in tokenizer.names},
    "gaudi_config": gaudi_config.read("hf://acme/bert", None),
}
for what in ("hf://acme/none", "hf://acme/bert"):
    try:
        open_artifact(what, kind="packed-tokens", s3=None, scratch=scratch)
    except TrainyardError as error:
        found[what] = f"{type(error).__name__} {error}"
try:
    fetch_inputs(arguments.model_copy(update={"config": None, "model": "hf://acme/bert"}), None, scratch)
except TrainyardError as error:
    found["model"] = str(error)
print(json.dumps(found))
"""


def test_tokens_tokenizer_configuration_and_gaudi_config_are_read_from_the_hub(
    hub: Hub, packed: Path, tiny_bert: Path, s3: "S3Client", tmp_path: Path
) -> None:
    manifest = publish(packed, s3, S3Location("runs", "research/hub-20260102-030405-0a1b/")).existing()
    assert manifest is not None
    hub.files["datasets/acme/tokens"] = {
        **{name: (packed / name).read_bytes() for name in manifest.files},
        MANIFEST: manifest.model_dump_json().encode(),
        "README.md": b"as a push leaves it",
    }
    bert = {path.name: path.read_bytes() for path in tiny_bert.iterdir()}
    settings = {"use_torch_autocast": True, "autocast_fp32_ops": ["mm"], "optimum_version": "1.18.1"}
    hub.files["acme/bert"] = {**bert, "gaudi_config.json": json.dumps(settings).encode()}
    hub.files["datasets/acme/bert"] = {"README.md": b"a data set without a manifest"}

    ended = subprocess.run(
        [sys.executable, "-c", READ],
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["fingerprint"] == manifest.fingerprint
    assert found["config"]["hidden_size"] == json.loads(bert["config.json"])["hidden_size"]
    assert found["tokenizer"]["tokenizer.json"] == bert["tokenizer.json"].decode()
    assert "model.safetensors" not in found["tokenizer"]
    assert found["gaudi_config"] == {"use_torch_autocast": True, "autocast_fp32_ops": ["mm"]}
    assert found["hf://acme/none"].startswith("NotFoundError hf://acme/none: ")
    assert "hf://acme/bert is no 'packed-tokens': it has no manifest.json" in found["hf://acme/bert"]
    # The model was fetched, and its vocabulary is that of the tokens
    assert "model" not in found
    assert Index.read(packed).vocabulary_size == len(json.loads(bert["tokenizer.json"])["model"]["vocab"]), INDEX
