"""Stop new work of a stage or a team when its monthly budget is used up or it spends too much an hour.

A budget at 100 %, and the alarm of an hourly limit, publish to a topic, which calls this function. Batch's
service-linked role launches instances, and the IAM policies of AWS's budget actions do not reach it. So this function
stops work:

- Stage budget: disable the stage's compute environments. Running jobs continue, but nothing new starts.
- Team budget: write the parameter that makes `trainyard submit` refuse, cancel the team's waiting jobs, and tag the
  team's member role, if there is one; with the tag, the role's own policy denies SubmitJob.
- Hourly limit: disable the compute environments of the stage, or of the team, until the alarm is OK.

A schedule calls it on the first of each month to end the stops of budgets. The end of a stop leaves environments
disabled that another stop covers, or that were disabled before: by a person, or because their instances never joined. A
deployment may enable a disabled compute environment; CloudFormation's event then calls this function, which disables it
again.

Budgets, limits, stops and member roles are separate SSM parameters, so their number is not limited.
"""

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from infra.observability.functions.batch_jobs import describe

STAGE_BUDGET, STAGE_STOP = "stage-budget", "stage-budget-stop"
TEAM_BUDGETS, TEAM_STOPS, MEMBER_ROLES = "budget/", "budget-stop/", "member-role/"
STAGE_LIMIT, STAGE_HOURLY_STOP = "stage-hourly-limit", "stage-hourly-stop"
TEAM_LIMITS, TEAM_HOURLY_STOPS = "hourly-limit/", "hourly-stop/"
"""Parameters below the stage's path. Those that end with a slash are prefixes, followed by a team's name.

A budget is deployed as {"limit_usd": …, "topic": …}, an hourly limit as {"usd_per_hour": …, "alarm": …}. This function
writes a stop while the budget is used up, or the alarm is raised.
"""

DISABLED_BEFORE = "disabled_before"
"""Key of a stop of environments: names of those that were disabled when it began, and stay disabled."""

_MAX_REVIEWS = 5
"""At most this many looks at the alarms in one call, in case they never stay the same."""

STOP_TAG = "trainyard:budget-stop"
"""Tag of a member role that may not submit jobs. The value is the time at which the stop ends."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The budget of the stage or of a team."""

    team: str | None
    """The team, or None for the stage's budget."""
    limit_usd: float
    topic: str
    """ARN of the topic to which the budget publishes at 100 %."""


@dataclass(frozen=True)
class Ledger:
    """The stage's compute environments as Batch describes them, by name, and its parameters, by name below its path."""

    environments: dict[str, dict[str, Any]]
    values: dict[str, str]

    def of(self, stage: str, teams: str) -> dict[str | None, dict[str, Any]]:
        """Return the content of the parameter `stage`, under None, and of those that begin with `teams`, by team."""
        names: dict[str | None, str] = {None: stage} if stage in self.values else {}
        names |= {name.removeprefix(teams): name for name in self.values if name.startswith(teams)}
        return {team: json.loads(self.values[name]) for team, name in names.items()}

    @property
    def budgets(self) -> list[Budget]:
        return [Budget(team=team, **value) for team, value in self.of(STAGE_BUDGET, TEAM_BUDGETS).items()]

    def member_role(self, team: str) -> str | None:
        """Return the name of the team's member role, or None if it has none."""
        arn = self.values.get(MEMBER_ROLES + team)
        return arn.rsplit("/", 1)[-1] if arn else None

    def covered(self, team: str | None) -> set[str]:
        """Return the names of the environments that a stop of `team` disables. None is the stage."""
        return {name for name, each in self.environments.items() if team in (None, each["tags"].get("trainyard:team"))}

    def disabled(self, team: str | None) -> set[str]:
        return {name for name in self.covered(team) if self.environments[name]["state"] == "DISABLED"}

    def other_stops(self, parameter: str) -> list[tuple[set[str], set[str]]]:
        """Return what each other stop of environments than `parameter` covers, and what was disabled before it."""
        stops = {hourly_stop_parameter(team): team for team in self.of(STAGE_HOURLY_STOP, TEAM_HOURLY_STOPS)}
        return [
            (self.covered(team), set(json.loads(self.values[name]).get(DISABLED_BEFORE, ())))
            for name, team in {STAGE_STOP: None, **stops}.items()
            if name in self.values and name != parameter
        ]


def stop_parameter(team: str | None) -> str:
    return STAGE_STOP if team is None else TEAM_STOPS + team


def hourly_stop_parameter(team: str | None) -> str:
    return STAGE_HOURLY_STOP if team is None else TEAM_HOURLY_STOPS + team


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Settings that the stack passes in the environment."""

    stage: str
    topic: str
    """ARN of the topic for alerts."""
    path: str
    """Path of the stage's parameters."""

    @classmethod
    def from_environment(cls) -> "Rules":
        return cls(
            stage=os.environ["STAGE"],
            topic=os.environ["TOPIC_ARN"],
            path=os.environ["PARAMETER_PATH"],
        )

    def owner(self, team: str | None) -> str:
        """Return the name of the stage or of a team, for messages."""
        return f"Team {team} (stage {self.stage})" if team else f"Stage {self.stage}"


def next_month(now: datetime) -> datetime:
    """Return when budgets start over. AWS's months are in UTC."""
    first = now.astimezone(timezone.utc).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return (first + timedelta(days=32)).replace(day=1)


def stop_record(budget: Budget, now: datetime) -> dict[str, Any]:
    """Return the content of a stop's parameter."""
    return {
        "budget_usd": budget.limit_usd,
        "since": now.astimezone(timezone.utc).isoformat(timespec="seconds"),
        "until": next_month(now).isoformat(timespec="seconds"),
    }


def is_over(record: dict[str, Any], now: datetime) -> bool:
    return now >= datetime.fromisoformat(record["until"])


def cancel_reason(budget: Budget, record: dict[str, Any]) -> str:
    return (
        f"budget of team {budget.team} ({budget.limit_usd:g} USD a month) is used up until {record['until'][:10]}; "
        "then submit it again: trainyard submit SPEC"
    )


class Account:
    """The calls to AWS."""

    def __init__(self, rules: Rules) -> None:
        import boto3  # noqa: PLC0415 - the functions above are used and tested without it

        self._rules = rules
        self._batch: Any = boto3.client("batch")
        self._ssm: Any = boto3.client("ssm")
        self._sns: Any = boto3.client("sns")
        self._iam: Any = boto3.client("iam")
        self._cloudwatch: Any = boto3.client("cloudwatch")

    def alert(self, text: str) -> None:
        self._sns.publish(TopicArn=self._rules.topic, Message=text)

    def ledger(self) -> Ledger:
        # Stops are recorded before they disable environments. So environments are read first: if another call has just
        # disabled one, its record is found.
        pages = self._batch.get_paginator("describe_compute_environments").paginate()
        environments = {
            each["computeEnvironmentName"]: each
            for page in pages
            for each in page["computeEnvironments"]
            if each.get("tags", {}).get("trainyard:stage") == self._rules.stage
        }
        path = self._rules.path
        pages = self._ssm.get_paginator("get_parameters_by_path").paginate(Path=path.rstrip("/"), Recursive=True)
        values = {item["Name"].removeprefix(path): item["Value"] for page in pages for item in page["Parameters"]}
        return Ledger(environments, values)

    def alarms(self, names: list[str]) -> dict[str, str]:
        """Return the states of alarms by name: OK, ALARM or INSUFFICIENT_DATA."""
        found = self._cloudwatch.describe_alarms(AlarmNames=names)["MetricAlarms"] if names else []
        return {alarm["AlarmName"]: alarm["StateValue"] for alarm in found}

    def write(self, parameter: str, record: dict[str, Any], ledger: Ledger) -> None:
        name, value = self._rules.path + parameter, json.dumps(record)
        self._ssm.put_parameter(Name=name, Value=value, Type="String", Overwrite=True)
        ledger.values[parameter] = value

    def delete(self, parameter: str, ledger: Ledger) -> None:
        with contextlib.suppress(self._ssm.exceptions.ParameterNotFound):
            self._ssm.delete_parameter(Name=self._rules.path + parameter)
        del ledger.values[parameter]

    def set_environments(self, names: Iterable[str], state: str, ledger: Ledger) -> list[str]:
        """Enable or disable compute environments. Return those that Batch refuses to change, for example while a
        deployment replaces their instances.
        """
        refused = []
        for name in sorted(names):
            try:
                self._batch.update_compute_environment(computeEnvironment=name, state=state)
            except self._batch.exceptions.ClientException as error:  # noqa: PERF203 - the others must still change
                print(f"{name}: {error}")
                refused.append(name)
            else:
                ledger.environments[name]["state"] = state
        return refused

    def _queues(self) -> list[str]:
        """Return the ARNs of the stage's queues, including those of retiring pools."""
        pages = self._batch.get_paginator("describe_job_queues").paginate()
        return [
            queue["jobQueueArn"]
            for page in pages
            for queue in page["jobQueues"]
            if queue.get("tags", {}).get("trainyard:stage") == self._rules.stage
        ]

    def cancel_waiting(self, team: str, reason: str) -> int:
        """Cancel the team's jobs that do not run yet. Return their number."""
        cancelled = 0
        for queue in self._queues():
            for state in ("SUBMITTED", "PENDING", "RUNNABLE"):
                pages = self._batch.get_paginator("list_jobs").paginate(jobQueue=queue, jobStatus=state)
                ids = [summary["jobId"] for page in pages for summary in page["jobSummaryList"]]
                for job in describe(self._batch, ids):
                    if job.get("tags", {}).get("trainyard:team") == team:
                        # CancelJob has no effect if the job has started in the meantime.
                        self._batch.cancel_job(jobId=job["jobId"], reason=reason)
                        cancelled += 1
        return cancelled

    def deny(self, role: str, until: str) -> None:
        self._iam.tag_role(RoleName=role, Tags=[{"Key": STOP_TAG, "Value": until}])

    def allow(self, role: str) -> None:
        self._iam.untag_role(RoleName=role, TagKeys=[STOP_TAG])


def stop(budget: Budget, account: Account, ledger: Ledger, rules: Rules, now: datetime) -> None:
    """Stop new work on a used-up budget. Safe to repeat."""
    before = ledger.of(STAGE_STOP, TEAM_STOPS).get(budget.team)
    record = stop_record(budget, now) if before is None or is_over(before, now) else before
    until = record["until"][:10]
    if budget.team is None:
        disabled, refused = disable(account, ledger, STAGE_STOP, None, record)
        account.alert(
            f"Stage {rules.stage} has used up its budget of {budget.limit_usd:g} USD: {disabled} compute environments "
            f"were disabled. Running jobs continue, but nothing new starts before {until}. Next, to continue earlier: "
            f"raise monthly_budget_usd in infra/settings.py and deploy.{still(refused, 'enabled')}"
        )
        return
    if record is not before:
        account.write(stop_parameter(budget.team), record, ledger)
    cancelled = account.cancel_waiting(budget.team, cancel_reason(budget, record))
    role = ledger.member_role(budget.team)
    if role:
        account.deny(role, record["until"])
    account.alert(
        f"Team {budget.team} (stage {rules.stage}) has used up its budget of {budget.limit_usd:g} USD: {cancelled} "
        f"waiting jobs were cancelled, and new ones are refused until {until}. Next, to continue earlier: raise "
        "monthly_budget_usd in infra/settings.py and deploy."
    )


def still(refused: list[str], state: str) -> str:
    """Return a sentence about environments that Batch refused to change, or an empty text if there are none."""
    if not refused:
        return ""
    return (
        f" Batch refused to change {', '.join(refused)}, which are still {state}: a deployment is updating their "
        "instances, and its end calls this function again."
    )


def disable(
    account: Account, ledger: Ledger, parameter: str, team: str | None, record: dict[str, Any]
) -> tuple[int, list[str]]:
    """Disable the compute environments of the stage or of a team, and write the record of the stop to `parameter`.

    Return the number of disabled ones, and the names of those that Batch refuses to disable. The record keeps the names
    of environments that no stop disabled, which are few, because a parameter holds 4 KB and a stage has up to 50
    environments.
    """
    before = ledger.values.get(parameter)
    disabled = ledger.disabled(team)
    if before is None:
        untouched = disabled.difference(*(covered - earlier for covered, earlier in ledger.other_stops(parameter)))
    else:
        # A deployment may have enabled one of them since.
        untouched = disabled & set(json.loads(before).get(DISABLED_BEFORE, ()))
    updated = {**record, DISABLED_BEFORE: sorted(untouched)}
    if before is None or updated != json.loads(before):
        account.write(parameter, updated, ledger)
    enabled = ledger.covered(team) - disabled
    refused = account.set_environments(enabled, "DISABLED", ledger)
    return len(enabled) - len(refused), refused


def enable(account: Account, ledger: Ledger, parameter: str, team: str | None) -> list[str]:
    """Enable what the stop in `parameter` disabled, unless another stop covers it. Return what Batch refuses."""
    untouched = set(json.loads(ledger.values[parameter]).get(DISABLED_BEFORE, ()))
    covered = untouched.union(*(covered for covered, _ in ledger.other_stops(parameter)))
    return account.set_environments(ledger.disabled(team) - covered, "ENABLED", ledger)


def review_budgets(account: Account, ledger: Ledger, rules: Rules, now: datetime) -> None:
    """End stops whose month is over or whose budget was raised or removed, and enforce the others again."""
    limits = {budget.team: budget.limit_usd for budget in ledger.budgets}
    for team, record in ledger.of(STAGE_STOP, TEAM_STOPS).items():
        limit, role = limits.get(team), ledger.member_role(team) if team else None
        if limit is not None and not is_over(record, now) and limit <= record["budget_usd"]:
            if team is None:
                disable(account, ledger, STAGE_STOP, None, record)
            elif role:
                account.deny(role, record["until"])
            continue
        if team is None:
            refused = enable(account, ledger, STAGE_STOP, None)
            if refused:  # keep the record, so that the next call enables them
                account.alert(f"Stage {rules.stage} may start jobs again.{still(refused, 'disabled')}")
                continue
        elif role:
            account.allow(role)
        account.delete(stop_parameter(team), ledger)
        budget = "without a budget" if limit is None else f"with a budget of {limit:g} USD a month"
        account.alert(f"{rules.owner(team)} may start jobs again, {budget}.")


def review_limits(account: Account, rules: Rules, now: datetime) -> None:
    """Start, enforce again and end the stops of hourly limits.

    The alarms' states decide, not their messages, which may arrive late and in another order. Calls may overlap: the
    last one to act must have seen the newest states, so each looks again until they stay the same.
    """
    states: dict[str, str] | None = None
    for _ in range(_MAX_REVIEWS):
        ledger = account.ledger()
        limits = ledger.of(STAGE_LIMIT, TEAM_LIMITS)
        newest = account.alarms([limit["alarm"] for limit in limits.values()])
        if newest == states:
            return
        states = newest
        _apply_limits(account, ledger, states, rules, now)


def _apply_limits(account: Account, ledger: Ledger, states: dict[str, str], rules: Rules, now: datetime) -> None:
    limits = ledger.of(STAGE_LIMIT, TEAM_LIMITS)
    stops = ledger.of(STAGE_HOURLY_STOP, TEAM_HOURLY_STOPS)
    for team in {**limits, **stops}:
        limit, record, parameter = limits.get(team), stops.get(team), hourly_stop_parameter(team)
        state = "OK" if limit is None else states.get(limit["alarm"])
        if limit and state == "ALARM":
            since = {"since": now.isoformat(timespec="seconds")}
            disabled, refused = disable(account, ledger, parameter, team, record or since)
            if record is None:
                account.alert(
                    f"{rules.owner(team)} spends more than its limit of {limit['usd_per_hour']:g} USD an hour: "
                    f"{disabled} compute environments were disabled. Running jobs continue, and new ones start once "
                    "the cost is below the limit. Next, to continue earlier: raise max_usd_per_hour in "
                    f"infra/settings.py and deploy.{still(refused, 'enabled')}"
                )
        elif record is not None and state == "OK":
            refused = enable(account, ledger, parameter, team)
            if not refused:  # else keep the record, so that the next call enables them
                account.delete(parameter, ledger)
            account.alert(f"{rules.owner(team)}: the stop at the hourly limit has ended.{still(refused, 'disabled')}")


def handler(event: dict[str, Any], _context: object) -> None:
    """Handle an event of a budget or an alarm (through SNS), of the monthly schedule, or of CloudFormation."""
    rules = Rules.from_environment()
    account, now = Account(rules), datetime.now(timezone.utc)
    ledger = account.ledger()
    if "Records" in event:
        topics = {record["Sns"]["TopicArn"] for record in event["Records"]}
        # The budget may have been removed from the settings since it published.
        for budget in ledger.budgets:
            if budget.topic in topics:
                stop(budget, account, ledger, rules, now)
    else:
        review_budgets(account, ledger, rules, now)
    review_limits(account, rules, now)
