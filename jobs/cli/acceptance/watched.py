"""The step that checks the monitoring of the stage: alarms, dashboard, metrics, budgets and the bill."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from jobs.aws.errors import error_code
from jobs.cli.acceptance.context import Context
from jobs.cli.acceptance.deployment import findings
from jobs.cli.acceptance.runner import Step
from jobs.cli.costs import read_receipts
from jobs.core.acceptance import NOT_PROVEN, PROVEN, WATCHED, Evidence
from jobs.core.errors import TrainyardError
from jobs.core.records import Receipt
from jobs.core.words import counted
from jobs.money.costs import Month, costs
from jobs.runs import batch, storage

BILL_DAYS = 14
"""Days whose receipts are compared. Older receipts may be from another release."""

BILL_LATE_DAYS = 1
"""Cost Explorer refreshes its data at least once every 24 hours (its user guide): the newest day may be incomplete."""

BILL_TOLERANCE = 0.25
"""Fraction of the bill by which the receipts may differ: they leave out the boot and the idle time of instances."""

COST_TAGS = "cost allocation tags"
"""Name of a check of the preflight (infra/preflight/billing.py)."""

_ON_RECORD = "the emulator only records these: it measures nothing and sends no notification"
_UNTAGGED = "the bill has no tagged run yet: tags have to be activated, and the bill is a day late"

Bill = Mapping[str, float] | str
"""EC2 costs in USD by run, with an empty name for instances without a run; or why the bill is unknown."""


def watched_step(context: Context) -> Step:
    return Step(name=WATCHED, run=lambda _ids: _watched(context))


def _watched(context: Context) -> list[Evidence]:
    """Check alarms, budgets and costs. Raises TrainyardError if a resource of the stage's templates is missing."""
    stack = f"trainyard-{context.stage}-observability"
    pages = context.aws.client("cloudformation").get_paginator("list_stack_resources").paginate(StackName=stack)
    created: dict[str, list[str]] = {}
    for resource in (each for page in pages for each in page["StackResourceSummaries"]):
        created.setdefault(resource["ResourceType"], []).append(resource.get("PhysicalResourceId", ""))
    now = datetime.now(timezone.utc)
    days = bill_days(now)
    tags = [found for found in findings(context) if found["check"] == COST_TAGS and found["verdict"] != "ok"]
    bill = "there is no bill" if context.aws.emulated else billed_by_run(context, days)
    receipts: list[Receipt] = []
    if not context.aws.emulated:
        stage = batch.read_stage(context.aws, context.stage)
        receipts, _ = read_receipts(context.aws, storage.stored_runs(context.aws, stage))
    return [_alerts(context, created), _budgets(context, created, bill, tags), compared(receipts, bill, days)]


def _alerts(context: Context, created: Mapping[str, list[str]]) -> Evidence:
    cloudwatch = context.aws.client("cloudwatch")
    names, dashboards = created.get("AWS::CloudWatch::Alarm", []), created.get("AWS::CloudWatch::Dashboard", [])
    alarms: list[Any] = cloudwatch.describe_alarms(AlarmNames=names)["MetricAlarms"] if names else []
    mute = [alarm["AlarmName"] for alarm in alarms if not alarm["AlarmActions"]]
    if len(alarms) < len(names) or mute or not names:
        raise TrainyardError(
            f"{len(alarms)} of {len(names)} alarms exist, and {len(mute)} of them send no notification"
        )
    for name in dashboards:
        cloudwatch.get_dashboard(DashboardName=name)
    pages = cloudwatch.get_paginator("list_metrics").paginate(Namespace=f"trainyard/{context.stage}")
    metrics = sorted({metric["MetricName"] for page in pages for metric in page["Metrics"]})
    listeners = _listeners(context, {action for alarm in alarms for action in alarm["AlarmActions"]})
    text = (
        f"{counted(len(alarms), 'alarm')}, {counted(len(dashboards), 'dashboard')}, metrics: "
        f"{', '.join(metrics) or 'none'}; confirmed addresses: {listeners}"
    )
    ids = {f"alarm {number}": alarm["AlarmName"] for number, alarm in enumerate(alarms, start=1)}
    ids |= {f"dashboard {number}": name for number, name in enumerate(dashboards, start=1)}
    if context.aws.emulated:
        text += f"; {_ON_RECORD}"
    elif not listeners:
        text += "; add some to `alerts` in infra/settings.py"
    proven = not context.aws.emulated and metrics and dashboards and listeners
    return Evidence(claim="alerts", outcome=PROVEN if proven else NOT_PROVEN, text=text, ids=ids)


def _listeners(context: Context, topics: set[str]) -> int:
    """Return the number of confirmed subscribers of the topics."""
    pages = context.aws.client("sns").get_paginator("list_subscriptions_by_topic")
    found = [
        each["SubscriptionArn"]
        for topic in topics
        if ":sns:" in topic
        for page in pages.paginate(TopicArn=topic)
        for each in page["Subscriptions"]
        if each["Protocol"] != "lambda"
    ]
    return sum(arn.startswith("arn:") for arn in found)


def _budgets(
    context: Context, created: Mapping[str, list[str]], bill: Bill, tags: Sequence[Mapping[str, str]]
) -> Evidence:
    """`tags`: what the preflight found about cost allocation tags that may be inactive."""
    names, budgets = set(created.get("AWS::Budgets::Budget", [])), list[Any]()
    if names:
        pages = context.aws.client("budgets").get_paginator("describe_budgets").paginate(AccountId=context.aws.account)
        budgets = [each for page in pages for each in page.get("Budgets", []) if each["BudgetName"] in names]
    if len(budgets) < len(names):
        raise TrainyardError(f"{len(budgets)} of {len(names)} budgets exist")
    limits = ", ".join(f"{each['BudgetLimit']['Amount']} {each['BudgetLimit']['Unit']}" for each in budgets)
    what = bill if isinstance(bill, str) else f"the bill has {sum(bill.values()):.2f} USD for the stage's instances"
    unsure = "".join(f"; {found['text']}. Next: {found['next_step']}" for found in tags)
    text = f"budgets: {limits or 'the settings have none'}; {what}{unsure}"
    if context.aws.emulated:
        text += f"; {_ON_RECORD}"
    ids = {f"budget {number}": each["BudgetName"] for number, each in enumerate(budgets, start=1)}
    proven = bool(budgets) and not isinstance(bill, str) and not tags
    return Evidence(claim="bill", outcome=PROVEN if proven else NOT_PROVEN, text=text, ids=ids)


def bill_days(now: datetime) -> Month:
    """Return the days to compare: only those for which Cost Explorer has all data."""
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    return Month(begin=today - timedelta(days=BILL_DAYS), end=today - timedelta(days=BILL_LATE_DAYS))


def billed_by_run(context: Context, days: Month) -> Bill:
    """Return the cost of the stage's instances by run, from Cost Explorer's tags."""
    request: dict[str, Any] = {
        "TimePeriod": {"Start": f"{days.begin:%Y-%m-%d}", "End": f"{days.end:%Y-%m-%d}"},
        "Granularity": "DAILY",
        "Metrics": ["UnblendedCost"],
        "Filter": {
            "And": [
                {"Tags": {"Key": "trainyard:stage", "Values": [context.stage]}},
                {"Dimensions": {"Key": "SERVICE", "Values": ["Amazon Elastic Compute Cloud - Compute"]}},
            ]
        },
        "GroupBy": [{"Type": "TAG", "Key": "trainyard:run"}],
    }
    billed: dict[str, float] = {}
    try:
        while True:
            answer = context.aws.client("ce").get_cost_and_usage(**request)
            for group in (group for day in answer["ResultsByTime"] for group in day.get("Groups", [])):
                run = group["Keys"][0].partition("$")[2]  # "trainyard:run$RUN"; nothing follows if there is no tag
                billed[run] = billed.get(run, 0.0) + float(group["Metrics"]["UnblendedCost"]["Amount"])
            if not answer.get("NextPageToken"):
                return billed or _UNTAGGED
            request["NextPageToken"] = answer["NextPageToken"]
    except Exception as error:  # noqa: BLE001 - not activated or denied: the bill is optional
        return f"Cost Explorer did not answer ({error_code(error) or error})"


def compared(receipts: Sequence[Receipt], bill: Bill, days: Month) -> Evidence:
    """Compare the receipts of the days with the bill, run by run."""
    counted_usd = {row.name: row.usd for row in costs(receipts, by="run", month=days)}
    known = [] if isinstance(bill, str) else [run for run in counted_usd if run in bill]
    if isinstance(bill, str):
        text = bill
    elif not counted_usd:
        text = (
            f"unknown: no run in the {BILL_DAYS} days up to {days.end:%Y-%m-%d}, and the bill is up to a day late. Use "
            "--keep on a stage that has been used for some days"
        )
    elif not known:
        text = f"unknown: {_UNTAGGED}"
    else:
        ours, theirs = sum(counted_usd[run] for run in known), sum(bill[run] for run in known)
        text = (
            f"{days.begin:%Y-%m-%d} to {days.end:%Y-%m-%d}: the receipts of {len(known)} of {len(counted_usd)} runs "
            f"add up to {ours:.2f} USD, the bill to {theirs:.2f} USD, which includes booting and idling"
        )
        if abs(theirs - ours) <= BILL_TOLERANCE * theirs:
            return Evidence(claim="costs", outcome=PROVEN, text=text)
    return Evidence(claim="costs", outcome=NOT_PROVEN, text=text)
