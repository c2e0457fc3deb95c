"""Current prices from AWS's responses (checked by botocore's model), and recorded prices if AWS gives none."""

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
from botocore.stub import ANY, Stubber

from jobs.aws.connection import Aws
from jobs.core.instance_types import instance_type
from jobs.money.aws_prices import current_prices
from jobs.money.prices import recorded

ROW = instance_type("p4d.24xlarge")


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Aws]:
    """A connection to a region of AWS, none of whose requests leaves this process."""
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    current_prices.cache_clear()
    yield Aws(region="us-west-2")
    current_prices.cache_clear()


def spot(zone: str, price: str, hour: int) -> dict[str, Any]:
    at = datetime(2026, 11, 23, hour, tzinfo=timezone.utc)
    return {"AvailabilityZone": zone, "SpotPrice": price, "Timestamp": at, "InstanceType": ROW.name}


def product(*dimensions: tuple[str, str]) -> str:
    """A product of GetProducts, in the format of its API reference."""
    prices = {
        f"rate.{number}": {"unit": unit, "pricePerUnit": {"USD": price}}
        for number, (unit, price) in enumerate(dimensions)
    }
    return json.dumps({"product": {}, "terms": {"OnDemand": {"SKU.TERM": {"priceDimensions": prices}}}})


def asked(aws: Aws, *, history: list[dict[str, Any]] | None, products: list[str] | None) -> tuple[Stubber, Stubber]:
    """Stubs with these responses; None: the request is denied."""
    ec2, pricing = Stubber(aws.quick_ec2), Stubber(aws.pricing)
    if history is None:
        ec2.add_client_error("describe_spot_price_history", "UnauthorizedOperation")
    else:
        expected = {"InstanceTypes": [ROW.name], "ProductDescriptions": ["Linux/UNIX"], "StartTime": ANY}
        ec2.add_response("describe_spot_price_history", {"SpotPriceHistory": history}, expected)
    if products is None:
        pricing.add_client_error("get_products", "AccessDeniedException")
    else:
        pricing.add_response("get_products", {"PriceList": products}, {"ServiceCode": "AmazonEC2", "Filters": ANY})
    return ec2, pricing


def test_current_prices_come_from_aws_with_their_zones(aws: Aws) -> None:
    history = [spot("us-west-2a", "9.10", 11), spot("us-west-2a", "7.00", 10), spot("us-west-2b", "8.25", 9)]
    products = [product(("Hrs", "21.9576420000"), ("Hrs", "0.0000000000"))]
    ec2, pricing = asked(aws, history=history, products=products)
    with ec2, pricing:
        prices = current_prices(aws, ROW)
        assert current_prices(aws, ROW) is prices, "AWS is asked once"
    ec2.assert_no_pending_responses()
    pricing.assert_no_pending_responses()
    assert prices.spot.usd_per_hour == 9.10, "of the dearest zone, in which the job may run"
    assert prices.spot.source == "EC2's Spot price history: 8.25 in us-west-2b, 9.10 in us-west-2a"
    assert prices.on_demand.usd_per_hour == 21.957642
    assert prices.on_demand.source == "AWS's Price List API, us-west-2"
    assert prices.spot.date == prices.on_demand.date == f"{datetime.now(timezone.utc):%Y-%m-%d}"


@pytest.mark.parametrize(
    ("history", "products"),
    [
        (None, None),
        ([], []),
        ([], ["{}"]),
        ([], [product(("Hrs", "1.0")), product(("Hrs", "2.0"))]),
    ],
    ids=["denied", "not offered", "of another shape", "ambiguous"],
)
def test_recorded_price_is_used_if_aws_gives_none(
    aws: Aws, history: list[dict[str, Any]] | None, products: list[str] | None
) -> None:
    ec2, pricing = asked(aws, history=history, products=products)
    with ec2, pricing:
        assert current_prices(aws, ROW) == recorded(ROW)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "https://stand-in.example"])
def test_emulator_is_not_queried_for_prices(aws: Aws, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setattr(Aws, "pricing", property(lambda _: pytest.fail("it was asked")))
    assert current_prices(Aws(region="us-west-2"), ROW) == recorded(ROW)
