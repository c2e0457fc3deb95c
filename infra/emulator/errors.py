"""Errors that whoever starts the emulator can act on: the program prints one and ends with its exit code."""


class EmulatorError(Exception):
    """Says what is wrong and what to do about it; printed without a traceback."""

    def __init__(self, message: str, *, next_step: str | None = None, exit_code: int = 1) -> None:
        """`next_step` is the command or edit that gets the user further; it is printed on a line of its own."""
        super().__init__(f"{message}\nNext: {next_step}" if next_step else message)
        self.exit_code = exit_code


class ConfigurationError(EmulatorError):
    """A setting of the server is wrong, or something that it needs is not there."""

    def __init__(self, message: str, *, next_step: str | None = None) -> None:
        super().__init__(message, next_step=next_step, exit_code=3)
