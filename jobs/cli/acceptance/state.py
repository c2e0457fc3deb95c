"""What an acceptance run has come to, on disk before and after every step, so that the same command goes on with it."""

import tempfile
import threading
from collections.abc import Callable, Iterator, MutableMapping
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from jobs.contract.acceptance import STEPS, AcceptanceRecord, StepRecord
from jobs.contract.errors import ConfigurationError


class State:
    """The record and its file; threads may change it through `change`."""

    def __init__(self, path: Path, record: AcceptanceRecord) -> None:
        self.path = path
        self.record = record
        self._lock = threading.RLock()

    @classmethod
    def open(
        cls, path: Path, *, stage: str, account: str, region: str, embedded: bool, max_usd: float, now: datetime
    ) -> "State":
        """Return the run that the file remembers, or a new one.

        Raises ConfigurationError where the file is none of this release.
        """
        try:
            record = AcceptanceRecord.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            record = AcceptanceRecord(
                stage=stage,
                account=account,
                region=region,
                embedded=embedded,
                max_usd=max_usd,
                started_at=now,
                steps=[StepRecord(name=name) for name in STEPS],
            )
        except (OSError, ValidationError):
            record = None
        if record is None or [step.name for step in record.steps] != list(STEPS):
            raise ConfigurationError(
                f"{path} is not the state of an acceptance run of this release",
                next_step=f"see what it left: aws resourcegroupstaggingapi get-resources --tag-filters "
                f"Key=trainyard:stage,Values={stage}; then remove the file",
            )
        record.max_usd = max_usd
        return cls(path, record)

    def change(self, change: Callable[[AcceptanceRecord], None]) -> None:
        """Change the record and write it: whole, or not at all."""
        with self._lock:
            change(self.record)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=self.path.parent, delete=False) as part:
                part.write(self.record.model_dump_json(indent=2) + "\n")
            Path(part.name).replace(self.path)

    def ids(self, step: str) -> "Ids":
        return Ids(self, step)


class Ids(MutableMapping[str, str]):
    """The ids of what a step has made. Each is on disk before the step goes on."""

    def __init__(self, state: State, step: str) -> None:
        self._state = state
        self._step = state.record.step(step)

    def __getitem__(self, key: str) -> str:
        return self._step.ids[key]

    def __setitem__(self, key: str, value: str) -> None:
        self._state.change(lambda _: self._step.ids.update({key: value}))

    def __delitem__(self, key: str) -> None:
        del self._step.ids[key]
        self._state.change(lambda _: None)

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._step.ids))

    def __len__(self) -> int:
        return len(self._step.ids)
