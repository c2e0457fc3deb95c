"""The step that looks at what watches the stage: alarms, dashboard, metrics, budgets and the bill."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from jobs.aws.errors import error_code
from jobs.cli.acceptance.context import Context
from jobs.cli.acceptance.runner import Step
from jobs.cli.costs import receipts_of
from jobs.client import batch, storage
from jobs.contract.acceptance import NOT_PROVEN, PROVEN, WATCHED, Evidence, Outcome
from jobs.contract.costs import Month, costs
from jobs.contract.errors import TrainyardError
from jobs.contract.records import Receipt
from jobs.contract.words import counted

BILL_DAYS = 14
"""Cost Explorer keeps days for longer; what a stage cost weeks ago was another release's receipts."""

BILL_LATE_DAYS = 1
"""Cost Explorer refreshes its data at least once every 24 hours (its user guide): today's and yesterday's may lack."""

BILL_TOLERANCE = 0.25
"""The part of the bill that receipts may differ by: they leave out how an instance boots and idles until it goes."""

_ON_RECORD = "the embedded AWS keeps these on record: nothing is measured, and nobody is told"


def watched_step(context: Context) -> Step:
    return Step(name=WATCHED, run=lambda _ids: watched(context))


def watched(context: Context) -> list[Evidence]:
    """Look at each. Raises TrainyardError where the stage lacks what its templates have."""
    made = _resources(context)
    return [_alerts(context, made), _bill(context, made), _costs(context)]


def _resources(context: Context) -> dict[str, list[str]]:
    """Return the physical names of what the observability stack made, by type."""
    name = f"trainyard-{context.stage}-observability"
    pages = context.aws.client("cloudformation").get_paginator("list_stack_resources").paginate(StackName=name)
    found: dict[str, list[str]] = {}
    for page in pages:
        for resource in page["StackResourceSummaries"]:
            found.setdefault(resource["ResourceType"], []).append(resource.get("PhysicalResourceId", ""))
    return found


def _alerts(context: Context, made: dict[str, list[str]]) -> Evidence:
    cloudwatch = context.aws.client("cloudwatch")
    names = made.get("AWS::CloudWatch::Alarm", [])
    alarms: list[Any] = cloudwatch.describe_alarms(AlarmNames=names)["MetricAlarms"] if names else []
    mute = [alarm["AlarmName"] for alarm in alarms if not alarm["AlarmActions"]]
    if len(alarms) < len(names) or mute or not names:
        raise TrainyardError(f"of {len(names)} alarms {len(alarms)} are there, and {len(mute)} tell nobody")
    dashboards = made.get("AWS::CloudWatch::Dashboard", [])
    for name in dashboards:
        cloudwatch.get_dashboard(DashboardName=name)
    pages = cloudwatch.get_paginator("list_metrics").paginate(Namespace=f"trainyard/{context.stage}")
    metrics = sorted({metric["MetricName"] for page in pages for metric in page["Metrics"]})
    listeners = _listeners(context, {action for alarm in alarms for action in alarm["AlarmActions"]})
    text = (
        f"{counted(len(alarms), 'alarm')}, {counted(len(dashboards), 'dashboard')}, metrics: "
        f"{', '.join(metrics) or 'none'}; addresses that have confirmed: {listeners}"
    )
    ids = {f"alarm {number}": alarm["AlarmName"] for number, alarm in enumerate(alarms, start=1)}
    ids |= {f"dashboard {number}": name for number, name in enumerate(dashboards, start=1)}
    if context.aws.embedded:
        return Evidence(claim="alerts", outcome=NOT_PROVEN, text=f"{text}; {_ON_RECORD}", ids=ids)
    if not listeners:
        text += ": name some in `alerts` of infra/settings.py"
    outcome = PROVEN if metrics and dashboards and listeners else NOT_PROVEN
    return Evidence(claim="alerts", outcome=outcome, text=text, ids=ids)


def _listeners(context: Context, topics: set[str]) -> int:
    """Return how many subscribers have confirmed that they listen to the topics."""
    sns = context.aws.client("sns")
    found = [
        one["SubscriptionArn"]
        for topic in topics
        if ":sns:" in topic
        for page in sns.get_paginator("list_subscriptions_by_topic").paginate(TopicArn=topic)
        for one in page["Subscriptions"]
    ]
    return sum(arn.startswith("arn:") for arn in found)


def _bill(context: Context, made: dict[str, list[str]]) -> Evidence:
    names = set(made.get("AWS::Budgets::Budget", []))
    budgets: list[Any] = []
    if names:
        pages = context.aws.client("budgets").get_paginator("describe_budgets").paginate(AccountId=context.aws.account)
        budgets = [one for page in pages for one in page.get("Budgets", []) if one["BudgetName"] in names]
        if len(budgets) < len(names):
            raise TrainyardError(f"of {len(names)} budgets {len(budgets)} are there")
    limits = ", ".join(f"{one['BudgetLimit']['Amount']} {one['BudgetLimit']['Unit']}" for one in budgets)
    text = f"budgets: {limits or 'the settings have none'}"
    ids = {f"budget {number}": one["BudgetName"] for number, one in enumerate(budgets, start=1)}
    if context.aws.embedded:
        return Evidence(claim="bill", outcome=NOT_PROVEN, text=f"{text}; {_ON_RECORD}, and there is no bill", ids=ids)
    billed, said = _billed(context)
    outcome = PROVEN if budgets and billed else NOT_PROVEN
    return Evidence(claim="bill", outcome=outcome, text=f"{text}; {said}", ids=ids)


def _costs(context: Context) -> Evidence:
    if context.aws.embedded:
        return Evidence(claim="costs", outcome=NOT_PROVEN, text="there is no bill to hold receipts against")
    stage = batch.read_stage(context.aws, context.stage)
    receipts, _ = receipts_of(context.aws, storage.stored_runs(context.aws, stage))
    return held_against_bill(context, receipts, now=datetime.now(timezone.utc))


def held_against_bill(context: Context, receipts: Sequence[Receipt], *, now: datetime) -> Evidence:
    """Hold receipts against AWS's bill, for the days of which it knows all."""
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    days = Month(begin=today - timedelta(days=BILL_DAYS), end=today - timedelta(days=BILL_LATE_DAYS))
    counted = {row.name: row.usd for row in costs(receipts, by="run", month=days)}
    if not counted:
        text = (
            f"not known yet: no run of the {BILL_DAYS} days up to {days.end:%Y-%m-%d}, and the bill is up to a day "
            "late; with --keep, on a stage that has run for some days, it is held against them"
        )
        return Evidence(claim="costs", outcome=NOT_PROVEN, text=text)
    try:
        billed = _billed_by_run(context, days)
    except Exception as error:  # noqa: BLE001 - not activated, denied: the bill is seen or not
        text = f"the bill could not be asked ({error_code(error) or error})"
        return Evidence(claim="costs", outcome=NOT_PROVEN, text=text)
    outcome, text = _compared(counted, billed)
    return Evidence(claim="costs", outcome=outcome, text=f"{days.begin:%Y-%m-%d} to {days.end:%Y-%m-%d}: {text}")


def _billed_by_run(context: Context, days: Month) -> dict[str, float]:
    """Return what EC2's instances cost by the bill, by the tag of the run that they were for."""
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
    explorer, billed = context.aws.client("ce"), dict[str, float]()
    while True:
        answer = explorer.get_cost_and_usage(**request)
        for group in (group for day in answer["ResultsByTime"] for group in day.get("Groups", [])):
            run = group["Keys"][0].partition("$")[2]  # "trainyard:run$RUN"; without the tag nothing follows
            billed[run] = billed.get(run, 0.0) + float(group["Metrics"]["UnblendedCost"]["Amount"])
        if not answer.get("NextPageToken"):
            return billed
        request["NextPageToken"] = answer["NextPageToken"]


def _compared(counted: Mapping[str, float], billed: Mapping[str, float]) -> tuple[Outcome, str]:
    """Return whether the bill has for the runs that it knows what was counted, and the figures of both, in USD."""
    known = {run: usd for run, usd in counted.items() if run in billed}
    if not known:
        return (
            NOT_PROVEN,
            "not known yet: the bill knows no run by its tag, which has to be activated, and is a day late",
        )
    ours, theirs = sum(known.values()), sum(billed[run] for run in known)
    text = (
        f"the receipts of {len(known)} of {len(counted)} runs come to {ours:.2f} USD, and their instances to "
        f"{theirs:.2f} USD in the bill, which has their start and their end besides"
    )
    return (PROVEN if abs(theirs - ours) <= BILL_TOLERANCE * theirs else NOT_PROVEN), text


def _billed(context: Context) -> tuple[bool, str]:
    """Return whether AWS's bill knows the stage's tag, and what it says; it is up to a day late."""
    today = datetime.now(timezone.utc).date()
    try:
        answer = context.aws.client("ce").get_cost_and_usage(
            TimePeriod={"Start": f"{today - timedelta(days=2)}", "End": f"{today + timedelta(days=1)}"},
            Granularity="DAILY",
            Metrics=["UnblendedCost"],
            Filter={"Tags": {"Key": "trainyard:stage", "Values": [context.stage]}},
            GroupBy=[{"Type": "TAG", "Key": "trainyard:team"}],
        )
    except Exception as error:  # noqa: BLE001 - not activated, denied: the bill is seen or not
        return False, f"the bill could not be asked ({error_code(error) or error})"
    groups = [group for day in answer["ResultsByTime"] for group in day.get("Groups", [])]
    total = sum(float(group["Metrics"]["UnblendedCost"]["Amount"]) for group in groups)
    if not groups:
        return (
            False,
            "the bill knows nothing of the stage's tag yet: it is a day late, and the tags have to be activated",
        )
    return True, f"the bill has {total:.2f} USD for the stage in the last two days, by team"
