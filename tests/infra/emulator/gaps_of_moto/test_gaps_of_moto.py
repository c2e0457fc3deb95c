"""What stock moto gets wrong about stacks and their resources, each run on both: it must fail there and pass here."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from tests.infra.emulator.gaps_of_moto import access, resources, services, stacks
from tests.support.emulator.stack_requests import Clients

GAPS = (*stacks.GAPS, *resources.GAPS, *services.GAPS, *access.GAPS)


@pytest.mark.parametrize("gap", GAPS)
def test_works_here(gap: Callable[[Clients], None], embedded_aws: Any) -> None:
    gap(embedded_aws.client)


@pytest.mark.parametrize("gap", GAPS)
def test_fails_on_stock_moto(gap: Callable[[Clients], None], stock_moto: Clients) -> None:
    # pytest.fail.Exception: what pytest.raises raises where nothing was raised
    with pytest.raises((AssertionError, ClientError, LookupError, ResponseParserError, pytest.fail.Exception)):
        gap(stock_moto)
    with suppress(ClientError, ResponseParserError):  # so that the next is not hit by what this one left
        for stack in stock_moto("cloudformation").describe_stacks()["Stacks"]:
            stock_moto("cloudformation").delete_stack(StackName=stack["StackId"])
