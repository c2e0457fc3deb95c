"""Current prices of an instance type from EC2's Spot price history and the Price List API, else the recorded prices.

Fields and filters are from the API references of DescribeSpotPriceHistory (EC2) and GetProducts (AWS Price List). The
response of GetProducts is a list of products as JSON texts.
"""

import functools
import json
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlsplit

from jobs.aws.connection import Aws
from jobs.core.instance_types import InstanceType
from jobs.money.prices import Prices, Quote, recorded

_LINUX = "Linux/UNIX"

_AWS_DOMAINS = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")
"""Domains of AWS endpoints, including VPC endpoints and dual-stack endpoints. No other endpoint is asked for prices,
because the emulator has none."""


@functools.cache
def current_prices(aws: Aws, row: InstanceType) -> Prices:
    """Return the current prices in the connection's region, or the recorded price if AWS returns none."""
    fallback = recorded(row)
    return Prices(
        on_demand=on_demand_quote(aws, row.name) or fallback.on_demand, spot=_spot(aws, row.name) or fallback.spot
    )


def _today() -> str:
    return f"{datetime.now(timezone.utc):%Y-%m-%d}"


def _asks_aws(aws: Aws) -> bool:
    return (urlsplit(aws.endpoint).hostname or "").endswith(_AWS_DOMAINS)


def spot_prices(aws: Aws, name: str) -> dict[str, float]:
    """Return the latest Spot price of an instance type in each zone; empty if AWS gives none."""
    if not _asks_aws(aws):
        return {}
    try:
        answer = aws.quick_ec2.describe_spot_price_history(
            InstanceTypes=[name],  # type: ignore[list-item] # the stubs may lack new types
            ProductDescriptions=[_LINUX],
            StartTime=datetime.now(timezone.utc),  # the current price of each zone
        )
    except Exception:  # noqa: BLE001 - denied, unreachable or unknown: use the recorded price
        return {}
    newest: dict[str, tuple[datetime, float]] = {}
    for item in answer["SpotPriceHistory"]:
        zone, found = item["AvailabilityZone"], (item["Timestamp"], float(item["SpotPrice"]))
        newest[zone] = max(newest.get(zone, found), found)
    return {zone: price for zone, (_, price) in newest.items()}


def _spot(aws: Aws, name: str) -> Quote | None:
    """Return the latest Spot price of the most expensive zone, because the job's zone is not known yet."""
    by_zone = sorted((price, zone) for zone, price in spot_prices(aws, name).items())
    if not by_zone:
        return None
    zones = ", ".join(f"{price:.2f} in {zone}" for price, zone in by_zone)
    return Quote(usd_per_hour=by_zone[-1][0], date=_today(), source=f"EC2's Spot price history: {zones}")


def on_demand_quote(aws: Aws, name: str) -> Quote | None:
    """Return the On-Demand price of an instance type in the connection's region, or None if AWS gives none."""
    if not _asks_aws(aws):
        return None
    wanted = {
        "instanceType": name,
        "regionCode": aws.ec2.meta.region_name,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    }
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    try:
        products = aws.pricing.get_products(ServiceCode="AmazonEC2", Filters=filters)["PriceList"]
        prices = {price for product in products for price in _hourly_usd(json.loads(product))}
    except Exception:  # noqa: BLE001 - denied, unreachable or an unknown format: use the recorded price
        return None
    if len(prices) != 1:  # no price, or several that the filters do not distinguish
        return None
    return Quote(usd_per_hour=prices.pop(), date=_today(), source=f"AWS's Price List API, {wanted['regionCode']}")


def _hourly_usd(product: dict[str, Any]) -> Iterator[float]:
    for term in product["terms"]["OnDemand"].values():
        for dimension in term["priceDimensions"].values():
            price = float(dimension["pricePerUnit"]["USD"])
            if dimension["unit"] == "Hrs" and price > 0:
                yield price
