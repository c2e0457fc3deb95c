"""The command `trainyard`."""


def main() -> None:
    """Entry point of the console script."""
