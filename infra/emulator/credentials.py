"""The credentials of one emulator: made up by the server, handed on through its state file and environments."""

import base64
import os
import secrets
from dataclasses import dataclass, field

from infra.emulator import REGION
from infra.emulator.errors import ConfigurationError

NEXT_STEP = 'eval "$(trainyard local env)"'

_RANDOM_BYTES = 20


@dataclass(frozen=True)
class Credentials:
    """The access key of one server."""

    access_key_id: str
    secret_access_key: str = field(repr=False)

    @classmethod
    def random(cls) -> "Credentials":
        """Make up credentials that nobody can guess."""
        return cls(f"TRAINYARD{random_letters()}", secrets.token_hex(_RANDOM_BYTES))

    @classmethod
    def from_environment(cls) -> "Credentials":
        """Read what `trainyard local env` sets. Raises ConfigurationError where it is not set."""
        try:
            return cls(os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
        except KeyError as error:
            raise ConfigurationError(
                f"the credentials of the emulator are missing: {error.args[0]} is not set", next_step=NEXT_STEP
            ) from None

    @property
    def environment(self) -> dict[str, str]:
        """Return what a client's environment needs besides AWS_ENDPOINT_URL."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_REGION": REGION,
        }


def random_letters() -> str:
    """Make up 32 letters and digits that nobody can guess."""
    return base64.b32encode(secrets.token_bytes(_RANDOM_BYTES)).decode()
