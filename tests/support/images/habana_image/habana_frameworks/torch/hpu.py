"""The functions of Habana's bridge that optimum-habana and DeepSpeed call on a machine without an HPU."""


def is_available() -> bool:
    return False


def device_count() -> int:
    return 0


def setDeterministic(wanted: bool) -> None:  # noqa: N802 - Habana's name
    """Do nothing. DeepSpeed's setup calls this."""


def memory_stats(device: object = None) -> dict[str, int]:
    """Return memory use in bytes, in the form that optimum-habana reads."""
    return {"InUse": 0, "MaxInUse": 0, "Limit": 0}


class Event:
    """An event in an HPU's work queue, which DeepSpeed uses in annotations."""


class Stream:
    """An HPU's work queue, which DeepSpeed uses in annotations."""
