"""The recipes of a node's HPUs, kept on S3: what one attempt has compiled, the next need not compile again.

    s3://<run bucket>/<team>/recipes/<fingerprint>/…   the bridge's own files, as it has written them

A recipe is a graph that Habana's compiler has compiled. The bridge finds one by its graph and keeps the folder below
its limit, the oldest recipes going first; stored recipes may be used again by the same software, on the same platform,
for the same model and precision (docs.habana.ai, "Managing and Reducing vLLM Warmup Time", which is about this variable
in general). The bridge still builds each graph, so the first steps stay slower than later ones. How much this saves a
training, and whether a recipe that is cut off by kill -9 is noticed by the bridge, could not be tried [?].
"""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from jobs.aws import s3 as object_store
from jobs.contract.errors import TrainyardError
from jobs.contract.locations import S3Location
from jobs.contract.recipe import hpu_trainer
from jobs.contract.run import CACHE_TAG
from jobs.train.accelerator import Accelerator
from jobs.train.launcher.request import Launch
from jobs.train.packages import image_packages
from jobs.train.rank import one_line

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

VARIABLE = "PT_HPU_RECIPE_CACHE_CONFIG"

SIZE_MB = 8 * 1024
"""A GB for each of eight cards: what the bridge's own example gives a worker."""

SAVE_SECONDS = 60.0
"""A reclaim loses what was compiled since the last save; most is compiled within the first minutes."""

SETTLED_SECONDS = 10.0
"""A file that was written so recently may not be whole yet."""


def recipe_variable(accelerator: Accelerator, scratch: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which the HPUs of a node share recipes: each would compile all of them itself.

    A folder, whether to empty it first, and its size in MB: the format that Habana's bridge checks it against. A value
    that the image has stays.
    """
    if accelerator.name != "hpu":
        return {}
    return {VARIABLE: environment.get(VARIABLE, f"{_folder(scratch)},false,{SIZE_MB}")}


def recipe_cache(
    launch: Launch, accelerator: Accelerator, scratch: Path, environment: Mapping[str, str]
) -> "RecipeCache | None":
    """Return the cache of this node; None without an HPU, and where the image keeps recipes in a place of its own."""
    if accelerator.name != "hpu" or VARIABLE in environment:
        return None
    team = S3Location(launch.run.bucket, launch.run.key.partition("/")[0])
    return RecipeCache(object_store.connect(), team / f"recipes/{fingerprint(launch)}", _folder(scratch))


def fingerprint(launch: Launch) -> str:
    """Return 64 digits that tell software, platform, kind, model and Trainer of a launch from those of all others."""
    model = getattr(launch.arguments, "model", None) or getattr(launch.arguments, "code", None)
    content = {
        "packages": image_packages(),
        "instance_type": launch.instance.name,
        "kind": launch.kind.name,
        "model": str(model),
        "hpu_trainer": hpu_trainer(launch.arguments),  # single operations in eager mode, graphs of many in lazy mode
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class RecipeCache:
    """Brings the recipes at `place` into `folder`, then keeps on S3 what comes to them, for the length of the block.

    All nodes do so: what another has stored meanwhile is not stored again. None of it fails a training.
    """

    def __init__(self, s3: "S3Client", place: S3Location, folder: Path) -> None:
        self._s3 = s3
        self._place = place
        self._folder = folder
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._save_until_the_end, name="recipes", daemon=True)

    def __enter__(self) -> "RecipeCache":
        self._folder.mkdir(parents=True, exist_ok=True)
        self._restore()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()

    def save(self, *, settled_seconds: float) -> int:
        """Store the recipes that are not on S3, but for those written in the last seconds. Returns their number.

        Raises TrainyardError where S3 does not take one.
        """
        stored = object_store.sizes(self._s3, self._place)
        before = time.time() - settled_seconds
        new = []
        for name in object_store.files_below(self._folder):
            try:
                state = (self._folder / name).stat()
            except FileNotFoundError:
                continue  # the bridge has made room
            if state.st_mtime <= before and stored.get(name) != state.st_size:
                new.append(name)

        def upload(name: str) -> bool:
            try:
                object_store.upload(self._s3, self._folder / name, self._place / name, tag=CACHE_TAG)
            except FileNotFoundError:
                return False  # as above
            return True

        return sum(object_store.in_threads(upload, new))

    def _restore(self) -> None:
        started = time.monotonic()
        try:
            stored = object_store.sizes(self._s3, self._place)
            object_store.download_all(self._s3, self._place, stored, self._folder)
        except TrainyardError as error:
            log.warning("warning: compiled graphs of earlier attempts cannot be read: %s", one_line(error))
            return
        if stored:
            megabytes, seconds = sum(stored.values()) / 1e6, time.monotonic() - started
            log.info("recipes: %d compiled before, %.1f MB in %.1f s", len(stored), megabytes, seconds)

    def _save_until_the_end(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._ending.wait(SAVE_SECONDS)
            try:
                self.save(settled_seconds=0 if is_over else SETTLED_SECONDS)  # once the ranks have ended, all are whole
            except Exception as error:  # noqa: BLE001 - the next save may succeed
                log.warning("warning: compiled graphs are not kept for the next attempt: %s", one_line(error))


def _folder(scratch: Path) -> Path:
    return scratch / "recipes"
