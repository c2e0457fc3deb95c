"""Submit a job of this stage to its fallback stage, which is in another region.

Only the job moves. The run's files stay in this stage's buckets, so command and environment stay the same, except for
Spot prices. Queue, job definition and image are those of the other stage.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from infra.observability.functions.batch_jobs import HOME_TAG, team_of

_NOT_BUILT = ":not-built-yet"
"""End of the URI of an image that was never pushed (jobs/core/stage.py)."""

_INSTANCE_TYPE, _OTHER_TYPES, _SPOT_PRICE = "--instance-type=", "--other-instance-types=", "--spot-usd-per-hour="
"""Options of the launcher (jobs/spec/launcher_options.py)."""


class RefusedError(Exception):
    """The job cannot run in the fallback stage."""


@dataclass(frozen=True, kw_only=True)
class FallbackStage:
    """What is deployed in the other stage."""

    name: str
    region: str
    parameters: Mapping[str, str]
    """Values by name, as in jobs/core/stage.py."""
    spot_prices: Mapping[str, float]
    """Price in US dollars of one instance for an hour, by instance type; empty if EC2 gave none."""

    @classmethod
    def read(cls, name: str, region: str) -> "FallbackStage":
        """Read the stage. Raises RefusedError if it is not deployed, or AWS does not allow it."""
        import boto3  # noqa: PLC0415 - the other functions are used and tested without it
        from botocore.exceptions import ClientError  # noqa: PLC0415

        path = f"/trainyard/{name}/"
        pages = boto3.client("ssm", region_name=region).get_paginator("get_parameters_by_path")
        try:
            found = {
                item["Name"].removeprefix(path): item["Value"]
                for page in pages.paginate(Path=path.rstrip("/"), Recursive=True)
                for item in page["Parameters"]
            }
        except ClientError as error:
            raise RefusedError(f"the parameters of stage {name} in {region} cannot be read: {error}") from None
        if not found:
            raise RefusedError(f"stage {name} is not deployed in {region}")
        ec2: Any = boto3.client("ec2", region_name=region)
        prices: dict[str, float] = {}
        with suppress(ClientError):  # the job then runs at the recorded price
            for item in ec2.describe_spot_price_history(
                InstanceTypes=found.get("instance-type", "").split(),
                ProductDescriptions=["Linux/UNIX"],
                StartTime=datetime.now(timezone.utc),  # the current price of each zone
            )["SpotPriceHistory"]:
                # The most expensive zone, because the job's zone is not known yet.
                instance_type = item["InstanceType"]
                prices[instance_type] = max(prices.get(instance_type, 0.0), float(item["SpotPrice"]))
        return cls(name=name, region=region, parameters=found, spot_prices=prices)

    def request(self, job: Mapping[str, Any], request: Mapping[str, Any], *, home: str) -> dict[str, Any]:
        """Return SubmitJob's arguments in this stage, from those that would submit the job again in its own stage.

        `home` is the job's stage and its run bucket, as `stage/bucket`. Raises RefusedError with what is missing here.
        """
        team, kind = team_of(job), job.get("tags", {}).get("trainyard:job", "")
        for stop in (f"budget-stop/{team}", "stage-budget-stop"):
            if stop in self.parameters:
                raise RefusedError(f"the budget of stage {self.name} is used up: it has the parameter {stop}")
        [task] = request["ecsPropertiesOverride"]["taskProperties"]
        [container] = task["containers"]
        [described] = job["ecsProperties"]["taskProperties"][0]["containers"]
        image = self._parameter(f"job-image/{kind}")
        # On an emulator without containers, no image was pushed for this stage either.
        if image.endswith(_NOT_BUILT) and not str(described.get("image")).endswith(_NOT_BUILT):
            raise RefusedError(f"the image of {kind} jobs was not pushed to stage {self.name}")
        container = {
            "name": container["name"],
            "command": self._with_prices(container["command"]),
            "environment": container["environment"],
        }
        return {
            **request,
            "jobQueue": self.parameters.get(f"team-queue/{team}/spot") or self._parameter("queue/spot"),
            "jobDefinition": self._parameter(f"job-definition/{team}/{kind}"),
            "tags": {**request["tags"], "trainyard:stage": self.name, HOME_TAG: home},
            "ecsPropertiesOverride": {"taskProperties": [{"containers": [container]}]},
        }

    def _parameter(self, name: str) -> str:
        try:
            return self.parameters[name]
        except KeyError:
            raise RefusedError(f"stage {self.name} in {self.region} has no {name}") from None

    def _with_prices(self, command: list[str]) -> list[str]:
        """Replace the Spot prices of the job's own region. Without a price, the launcher uses the recorded one."""
        kept = []
        for part in command:
            if part.startswith(_OTHER_TYPES):
                others = json.loads(part.removeprefix(_OTHER_TYPES))
                kept.append(_OTHER_TYPES + json.dumps({name: self.spot_prices.get(name) for name in others}))
            elif not part.startswith(_SPOT_PRICE):
                kept.append(part)
            price = self.spot_prices.get(part.removeprefix(_INSTANCE_TYPE)) if part.startswith(_INSTANCE_TYPE) else None
            if price is not None:
                kept.append(f"{_SPOT_PRICE}{price}")
        return kept
