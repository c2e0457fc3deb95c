"""Stop new work of a stage or a team when its monthly budget is used up, and allow it again in the next month.

A budget at 100 % publishes to its topic, which calls this function. Batch's service-linked role launches instances, and
the IAM policies of AWS's budget actions do not reach it. So this function stops work:

- Stage budget: disable the stage's compute environments. Running jobs continue, but nothing new starts.
- Team budget: write the parameter that makes `trainyard submit` refuse, cancel the team's waiting jobs, and tag the
  team's member role, if there is one; with the tag, the role's own policy denies SubmitJob.

A schedule calls it on the first of each month to undo this. Environments that were disabled before the stop stay
disabled: by a person, or because their instances never joined. A deployment may enable a disabled compute environment;
CloudFormation's event then calls this function, which disables it again.

Budgets, stops and member roles are separate SSM parameters, so their number is not limited.
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
"""Parameters below the stage's path. The last three are prefixes, followed by a team's name.

A budget is deployed as {"limit_usd": …, "topic": …}. This function writes the stop while the budget is used up.
"""

DISABLED_BEFORE = "disabled_before"
"""Key of a stage's stop: names of the compute environments that were disabled when it began, and stay disabled."""

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
    """The stage's parameters, by name below its path."""

    values: dict[str, str]

    @property
    def budgets(self) -> list[Budget]:
        teams = [name.removeprefix(TEAM_BUDGETS) for name in self.values if name.startswith(TEAM_BUDGETS)]
        named = [(None, STAGE_BUDGET)] if STAGE_BUDGET in self.values else []
        return [
            Budget(team=team, **json.loads(self.values[name]))
            for team, name in (*named, *((team, TEAM_BUDGETS + team) for team in teams))
        ]

    @property
    def stopped(self) -> list[str | None]:
        """Return the teams with a stop, including teams without a budget now. None is the stage."""
        teams = [name.removeprefix(TEAM_STOPS) for name in self.values if name.startswith(TEAM_STOPS)]
        return [*([None] if STAGE_STOP in self.values else []), *teams]

    def stop(self, team: str | None) -> dict[str, Any] | None:
        """Return the record of a stop, or None if the budget is not used up."""
        value = self.values.get(stop_parameter(team))
        return json.loads(value) if value else None

    def member_role(self, team: str) -> str | None:
        """Return the name of the team's member role, or None if it has none."""
        arn = self.values.get(MEMBER_ROLES + team)
        return arn.rsplit("/", 1)[-1] if arn else None


def stop_parameter(team: str | None) -> str:
    return STAGE_STOP if team is None else TEAM_STOPS + team


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

    def alert(self, text: str) -> None:
        self._sns.publish(TopicArn=self._rules.topic, Message=text)

    def ledger(self) -> Ledger:
        path = self._rules.path
        pages = self._ssm.get_paginator("get_parameters_by_path").paginate(Path=path.rstrip("/"), Recursive=True)
        return Ledger({item["Name"].removeprefix(path): item["Value"] for page in pages for item in page["Parameters"]})

    def write(self, parameter: str, record: dict[str, Any]) -> None:
        name = self._rules.path + parameter
        self._ssm.put_parameter(Name=name, Value=json.dumps(record), Type="String", Overwrite=True)

    def delete(self, parameter: str) -> None:
        with contextlib.suppress(self._ssm.exceptions.ParameterNotFound):
            self._ssm.delete_parameter(Name=self._rules.path + parameter)

    def environments(self, state: str) -> set[str]:
        """Return the names of the stage's compute environments in a state: ENABLED or DISABLED."""
        pages = self._batch.get_paginator("describe_compute_environments").paginate()
        return {
            environment["computeEnvironmentName"]
            for page in pages
            for environment in page["computeEnvironments"]
            if environment.get("tags", {}).get("trainyard:stage") == self._rules.stage and environment["state"] == state
        }

    def set_environments(self, names: Iterable[str], state: str) -> list[str]:
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


def stop(budget: Budget, account: Account, rules: Rules, now: datetime) -> None:
    """Stop new work on a used-up budget. Safe to repeat."""
    ledger = account.ledger()
    before = ledger.stop(budget.team)
    record = stop_record(budget, now) if before is None or is_over(before, now) else before
    until = record["until"][:10]
    if budget.team is None:
        disabled, refused = disable(account, before, record)
        account.alert(
            f"Stage {rules.stage} has used up its budget of {budget.limit_usd:g} USD: {disabled} compute environments "
            f"were disabled. Running jobs continue, but nothing new starts before {until}. Next, to continue earlier: "
            f"raise monthly_budget_usd in infra/settings.py and deploy.{still(refused, 'enabled')}"
        )
        return
    if record is not before:
        account.write(stop_parameter(budget.team), record)
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


def disable(account: Account, before: dict[str, Any] | None, record: dict[str, Any]) -> tuple[int, list[str]]:
    """Disable the stage's compute environments, and write the record of the stop.

    Return the number of disabled ones, and the names of those that Batch refuses to disable.

    `before`: the record so far; None if there was no stop. The record keeps the names of environments that the stop did
    not disable, which are few, because a parameter holds 4 KB and a stage has up to 50 environments.
    """
    enabled, disabled = account.environments("ENABLED"), account.environments("DISABLED")
    # A deployment may have enabled one of them since.
    untouched = disabled if before is None else disabled & set(before.get(DISABLED_BEFORE, ()))
    updated = {**record, DISABLED_BEFORE: sorted(untouched)}
    if updated != before:
        account.write(STAGE_STOP, updated)
    refused = account.set_environments(enabled, "DISABLED")
    return len(enabled) - len(refused), refused


def review(account: Account, rules: Rules, now: datetime) -> None:
    """End stops whose month is over or whose budget was raised or removed, and enforce the others again."""
    ledger = account.ledger()
    limits = {budget.team: budget.limit_usd for budget in ledger.budgets}
    for team in ledger.stopped:
        record, limit, role = ledger.stop(team), limits.get(team), ledger.member_role(team) if team else None
        if record and limit is not None and not is_over(record, now) and limit <= record["budget_usd"]:
            if team is None:
                disable(account, record, record)
            elif role:
                account.deny(role, record["until"])
            continue
        if team is None:
            untouched = (record or {}).get(DISABLED_BEFORE, ())
            refused = account.set_environments(account.environments("DISABLED") - set(untouched), "ENABLED")
            if refused:  # keep the record, so that the next call enables them
                account.alert(f"Stage {rules.stage} may start jobs again.{still(refused, 'disabled')}")
                continue
        elif role:
            account.allow(role)
        account.delete(stop_parameter(team))
        who = f"Team {team} (stage {rules.stage})" if team else f"Stage {rules.stage}"
        budget = "without a budget" if limit is None else f"with a budget of {limit:g} USD a month"
        account.alert(f"{who} may start jobs again, {budget}.")


def handler(event: dict[str, Any], _context: object) -> None:
    """Handle an event of a budget (through SNS), of the monthly schedule, or of CloudFormation."""
    rules = Rules.from_environment()
    account, now = Account(rules), datetime.now(timezone.utc)
    if "Records" not in event:
        review(account, rules, now)
        return
    topics = {record["Sns"]["TopicArn"] for record in event["Records"]}
    # The budget may have been removed from the settings since it published.
    for budget in account.ledger().budgets:
        if budget.topic in topics:
            stop(budget, account, rules, now)
