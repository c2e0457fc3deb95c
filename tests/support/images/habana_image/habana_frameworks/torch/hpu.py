"""What optimum-habana and DeepSpeed ask of Habana's bridge where there is no card."""


def is_available() -> bool:
    return False


def device_count() -> int:
    return 0


def setDeterministic(wanted: bool) -> None:  # noqa: N802 - Habana's name
    """Which DeepSpeed's setup calls; it takes no card."""


def memory_stats(device: object = None) -> dict[str, int]:
    """Bytes, as optimum-habana reads them."""
    return {"InUse": 0, "MaxInUse": 0, "Limit": 0}


class Event:
    """A mark in a card's queue of work, which DeepSpeed names in annotations."""


class Stream:
    """A card's queue of work, which DeepSpeed names in annotations too."""
