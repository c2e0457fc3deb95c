"""Settings of the server: numbers in its environment, most of them waits that tests shorten."""

import os

from infra.emulator.errors import ConfigurationError


def number_setting(variable: str, default: float) -> float:
    """Return a number from the server's environment. Raises ConfigurationError where it is none, or less than 0."""
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not 0 <= number < float("inf"):
        raise ConfigurationError(
            f"{variable}={text} is no number of 0 or more", next_step=f"unset {variable}, or set it to {default:g}"
        )
    return number
