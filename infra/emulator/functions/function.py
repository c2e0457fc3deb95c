"""A Lambda function: moto's, with the settings that moto loses."""

from typing import Any

from moto.awslambda.exceptions import InvalidParameterValueException
from moto.awslambda.models import LambdaFunction

from infra.emulator.credentials import Credentials


class Function(LambdaFunction):
    """A function."""

    endpoint: str
    """The server's own address; `service.install` sets it."""
    credentials: Credentials
    """The server's own; `service.install` sets it."""

    def __init__(self, account_id: str, spec: dict[str, Any], region: str, version: str | int = 1) -> None:
        super().__init__(account_id=account_id, spec=spec, region=region, version=version)
        self.dead_letter_config: dict[str, Any] | None = spec.get("DeadLetterConfig")
        self.logging_config: dict[str, Any] = spec.get("LoggingConfig") or {}

    @property
    def log_group(self) -> str:
        return str(self.logging_config.get("LogGroup") or f"/aws/lambda/{self.function_name}")

    @property
    def retries(self) -> int:
        """Return how often an asynchronous invocation that failed is tried again."""
        config = self.event_invoke_config[0].config if self.event_invoke_config else {}
        return int(config.get("MaximumRetryAttempts", 2))

    @property
    def why_it_cannot_run(self) -> str | None:
        """Say what stands in the way of running it here; None if nothing does."""
        if self.package_type != "Zip":
            return "the emulator runs functions from zip files only, not from container images"
        if not str(self.run_time).startswith("python"):
            return f"the emulator runs Python functions only, not {self.run_time}"
        if self.layers:
            return "the emulator runs functions without layers only"
        return None

    @property
    def environment(self) -> dict[str, str]:
        """Return all variables that it sees."""
        return {
            **self.credentials.environment,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_LAMBDA_FUNCTION_NAME": self.function_name,
            "AWS_LAMBDA_LOG_GROUP_NAME": self.log_group,
            "TZ": "UTC",
            **{name: str(value) for name, value in (self.environment_vars or {}).items()},
        }

    def get_configuration(self, on_create: bool = False) -> dict[str, Any]:
        configuration: dict[str, Any] = super().get_configuration(on_create)
        configuration["LoggingConfig"] = {"LogFormat": "Text", "LogGroup": self.log_group}
        if self.dead_letter_config:
            configuration["DeadLetterConfig"] = self.dead_letter_config
        return configuration

    def update_configuration(self, config_updates: dict[str, Any]) -> dict[str, Any]:
        if "DeadLetterConfig" in config_updates:
            self.dead_letter_config = config_updates["DeadLetterConfig"]
        if "LoggingConfig" in config_updates:
            self.logging_config = config_updates["LoggingConfig"] or {}
        super().update_configuration(config_updates)
        return self.get_configuration()

    def _set_function_code(self, updated_spec: dict[str, Any]) -> None:
        try:
            super()._set_function_code(updated_spec)
        except ValueError as error:  # moto's way to say that the bucket or the object is not there
            raise InvalidParameterValueException(str(error.args[-1])) from None
