"""Receipts of runs held against AWS's bill: what Cost Explorer is asked, against botocore's model of it."""

from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from jobs.aws.connection import Aws
from jobs.cli.acceptance.watched import held_against_bill
from jobs.contract.acceptance import Evidence
from jobs.contract.records import Receipt
from tests.support.jobs.acceptance import context_of
from tests.support.jobs.recorded_runs import BEGIN, three_attempts

RUN = three_attempts(20)
assert RUN.receipt is not None
RECEIPT = RUN.receipt
USD = RECEIPT.estimated_usd or 0.0


def day(*groups: tuple[str, str], at: str = "2026-11-01") -> dict[str, Any]:
    costs = {"Amount": "0", "Unit": "USD"}
    return {
        "TimePeriod": {"Start": at, "End": at},
        "Total": {},
        "Groups": [
            {"Keys": [key], "Metrics": {"UnblendedCost": {**costs, "Amount": amount}}} for key, amount in groups
        ],
        "Estimated": False,
    }


@pytest.fixture
def explorer(monkeypatch: pytest.MonkeyPatch) -> Stubber:
    make: Any = boto3.client
    client = make("ce", "us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    monkeypatch.setattr(Aws, "client", lambda _self, service: {"ce": client}[service])
    stub = Stubber(client)
    stub.activate()
    return stub


def evidence(*receipts: Receipt) -> Evidence:
    """What is said two days after the run."""
    return held_against_bill(context_of(), receipts, now=BEGIN.replace(day=3))


def test_runs_that_the_bill_knows_are_held_against_it(explorer: Stubber) -> None:
    key = f"trainyard:run${RUN.run_id}"
    request = {
        "TimePeriod": {"Start": "2026-10-20", "End": "2026-11-02"},
        "Granularity": "DAILY",
        "Metrics": ["UnblendedCost"],
        "Filter": {
            "And": [
                {"Tags": {"Key": "trainyard:stage", "Values": ["dev"]}},
                {"Dimensions": {"Key": "SERVICE", "Values": ["Amazon Elastic Compute Cloud - Compute"]}},
            ]
        },
        "GroupBy": [{"Type": "TAG", "Key": "trainyard:run"}],
    }
    # What no run is named for is a NAT gateway's, or a run's whose tag came late.
    first = {"ResultsByTime": [day((key, f"{USD * 0.7}"), ("trainyard:run$", "9"))], "NextPageToken": "2"}
    explorer.add_response("get_cost_and_usage", first, request)
    rest = {"ResultsByTime": [day((key, f"{USD * 0.4}"))]}
    explorer.add_response("get_cost_and_usage", rest, {**request, "NextPageToken": "2"})
    found = evidence(RECEIPT)
    assert found.outcome == "proven"
    assert f"1 of 1 runs come to {USD:.2f} USD, and their instances to {USD * 1.1:.2f} USD in the bill" in found.text


def test_a_bill_that_has_much_more_or_knows_nothing_yet_proves_nothing(explorer: Stubber) -> None:
    explorer.add_response("get_cost_and_usage", {"ResultsByTime": [day((f"trainyard:run${RUN.run_id}", "99"))]})
    explorer.add_response("get_cost_and_usage", {"ResultsByTime": [day(("trainyard:run$", "99"))]})
    explorer.add_client_error("get_cost_and_usage", "AccessDeniedException")
    assert "99.00 USD in the bill" in evidence(RECEIPT).text
    assert evidence(RECEIPT).text.partition(": ")[2].startswith("not known yet: the bill knows no run by its tag")
    denied = evidence(RECEIPT)
    assert denied.outcome == "not proven here"
    assert "could not be asked (AccessDeniedException)" in denied.text


def test_where_no_run_is_old_enough_it_is_not_known_yet(explorer: Stubber) -> None:
    assert evidence().outcome == "not proven here"
    assert evidence().text.startswith("not known yet: no run of the 14 days up to 2026-11-02")
