"""`trainyard dashboard`: one page of all runs of a stage, served on this machine, with a page for each run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from jobs.cli.options import parse_since

if TYPE_CHECKING:
    from jobs.aws.connection import Aws
    from jobs.cli.list import ListedRun
    from jobs.core.records import Receipt
    from jobs.core.stage import DeployedStage
    from jobs.report.dashboard import Board, MonthlyCost, Reason, ShownRun
    from jobs.runs.job import Job
    from jobs.runs.storage import StoredRun

ResultT = TypeVar("ResultT")

_SETTLED = timedelta(days=1)
"""Age of the last record of a run that Batch has forgotten, after which its receipt is not read again."""

_NAMED = 3
"""Maximum number of unknown things that are named with their reason."""


def dashboard(
    ctx: typer.Context,
    *,
    since: Annotated[
        str, typer.Option(help="Show runs submitted since this time: 12h or 7d ago, or an ISO 8601 time.")
    ] = "30d",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on localhost. 0 picks a free one.")] = 0,
) -> None:
    """Serve a page of all runs of the stage, until Ctrl-C.

    Prints the page's address, which contains a token, on stdout. The page shows what runs, waits and has failed, this
    month's cost, and a link to each run's report. It reads with your own AWS permissions, and is renewed every half
    minute. The global option --team shows only one team's runs.
    """
    from jobs.cli import tables
    from jobs.cli.serving import LivePages, serving
    from jobs.cli.terminal import print_text
    from jobs.core.errors import Detached

    parse_since(since)  # reports a wrong time here instead of in the browser
    site = Site(ctx.obj.aws(), ctx.obj.stage, team=ctx.obj.team, since=since)
    pages = LivePages(lambda path: site.page(path, token=pages.token))
    pages.html()
    with serving(pages, port) as server:
        print_text(f"http://127.0.0.1:{server.server_port}/?token={pages.token}")
        tables.stderr().print("serving the page on this machine until Ctrl-C; runs continue")
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            raise Detached("stopped serving; runs continue") from None


class Site:
    """The pages of a stage: that of all runs, and one of each run. Keeps receipts that do not change any more."""

    def __init__(self, aws: "Aws", stage_name: str, *, team: str | None, since: str) -> None:
        self._aws = aws
        self._stage_name = stage_name
        self._team = team
        self._since = since
        self._ended: dict[str, ListedRun] = {}
        self._settled: dict[str, Receipt | None] = {}

    def page(self, path: str, *, token: str) -> str:
        """Return the page of a path: `/`, `/run/ID` or `/sweep/ID`. Raises NotFoundError for any other."""
        from jobs.cli.report import page_of
        from jobs.core.errors import NotFoundError
        from jobs.core.run import is_run_id
        from jobs.report.dashboard import dashboard_page
        from jobs.runs import batch, storage

        query = f"?token={token}"
        if path == "/":
            return dashboard_page(self.board(now=datetime.now(timezone.utc)), query=query)
        kind, _, run_id = path.removeprefix("/").partition("/")
        if kind not in ("run", "sweep") or not is_run_id(run_id):
            raise NotFoundError("this server has no such page")
        stage = batch.read_stage(self._aws, self._stage_name)
        run = storage.find_run(self._aws, stage, run_id)
        return page_of(self._aws, stage, run, live=None, home=f"/{query}", query=query)

    def board(self, *, now: datetime) -> "Board":
        """Read everything that the page of all runs shows. Raises the error if not even the runs can be listed."""
        from jobs.runs import batch

        _ = self._aws.s3, self._aws.logs  # create the clients before the threads share them
        stage = batch.read_stage(self._aws, self._stage_name)
        jobs = batch.list_jobs(self._aws, stage, since=parse_since(self._since), team=self._team)
        teams = [self._team] if self._team else list(stage.teams)
        return _Reader(self._aws, stage, teams, jobs, self._ended, self._settled).board(now)


@dataclass(frozen=True)
class _Reader:
    """Reads what the page of all runs shows, once."""

    aws: "Aws"
    stage: "DeployedStage"
    teams: list[str]
    """Teams whose cost is shown."""
    jobs: "list[Job]"
    ended: "dict[str, ListedRun]"
    """Runs that have ended, by the ids of their newest jobs. They are not read again."""
    settled: "dict[str, Receipt | None]"
    """Receipts of runs that Batch has forgotten, by run id. They are not read again."""
    unknown: list[tuple[str, str]] = field(default_factory=list)
    """What could not be read, and why."""

    def board(self, now: datetime) -> "Board":
        from jobs.report.dashboard import Board
        from jobs.runs.storage import in_parallel, runs_of_team

        def stored_of(team: str) -> "list[StoredRun] | None":
            what = f"cost and results of team {team}"
            return self._if_readable(what, lambda: runs_of_team(self.aws, self.stage, team))

        found = in_parallel(stored_of, self.teams)
        stored = {team: runs for team, runs in zip(self.teams, found, strict=True) if runs is not None}
        listed = in_parallel(self._listed, [job for job in self.jobs if job.team in stored])
        runs = {run.job.run_id: run for run in listed if run is not None}
        self.ended.update({run.job.id: run for run in runs.values() if run.job.ended})
        return Board(
            stage=self.stage.name,
            emulated=self.stage.emulated,
            now=now,
            runs=in_parallel(lambda job: self._shown(job, runs.get(job.run_id)), self.jobs),
            teams=sorted({*self.teams, *(job.team for job in self.jobs)}),
            costs=self._costs(stored, runs.values(), now),
            waiting=self._waiting(),
            unknown=self._unknown_lines(),
        )

    def _listed(self, job: "Job") -> "ListedRun | None":
        from jobs.cli.list import read_listed

        what = f"cost and result of {job.run_id}"
        return self.ended.get(job.id) or self._if_readable(what, lambda: read_listed(self.aws, self.stage, job))

    def _shown(self, job: "Job", run: "ListedRun | None") -> "ShownRun":
        from jobs.report.dashboard import ShownRun
        from jobs.runs.logs import newest_progress
        from jobs.runs.sweeps import DONE

        if run is None:
            return ShownRun(job=job)
        progress, working = None, []
        standings = run.sweep.points if run.sweep else ()
        if job.state == "RUNNING":
            receipts = [each.receipt for each in standings if each.state == "running"] or [run.receipt]
            working = [receipt.attempts[-1] for receipt in receipts if receipt and receipt.state == "running"]
        if job.state == "RUNNING" and not job.points:
            log_group = self.stage.log_group
            progress = self._if_readable(
                f"progress of team {job.team}", lambda: newest_progress(self.aws, log_group, job.log_streams)
            )
        return ShownRun(
            job=job,
            receipt=run.receipt,
            usd=run.usd,
            metric=run.metric,
            progress=progress,
            points=(sum(each.state in DONE for each in standings), len(standings)) if standings else None,
            ended_by=run.sweep.reason if run.sweep else job.ended_by(run.receipt),
            working=working,
        )

    def _costs(
        self, stored: "Mapping[str, Sequence[StoredRun]]", listed: "Iterable[ListedRun]", now: datetime
    ) -> "list[MonthlyCost]":
        """Return this month's cost of the stage and of each team, from the receipts of all their runs."""
        from jobs.money.costs import costs, month_of
        from jobs.report.dashboard import MonthlyCost
        from jobs.runs.storage import in_parallel

        receipts: dict[str, Receipt | None] = {}
        for run in listed:
            points = {each.point.run_id: each.receipt for each in run.sweep.points} if run.sweep else {}
            receipts |= points or {run.job.run_id: run.receipt}
        others = [run for runs in stored.values() for run in runs if run.run_id not in receipts]
        read = in_parallel(lambda run: self._receipt(run, now), others)
        receipts |= {run.run_id: found[0] for run, found in zip(others, read, strict=True) if found}
        incomplete = {run.team for run, found in zip(others, read, strict=True) if not found}
        month = month_of("this", now=now)
        usd_of = {cost.name: cost.usd for cost in costs(filter(None, receipts.values()), by="team", month=month)}

        def cost(team: str) -> MonthlyCost:
            stage = self.stage
            stop = stage.budget_stop(team) if team else stage.stage_budget_stop
            return MonthlyCost(
                name=team or f"stage {stage.name}",
                usd=(usd_of.get(team, 0.0) if team in stored else None) if team else sum(usd_of.values()),
                is_partial=team in incomplete or (not team and (bool(incomplete) or len(stored) < len(self.teams))),
                budget_usd=stage.budget_usd(team),
                is_stopped=stop is not None and not stop.is_over(now),
            )

        teams = sorted(self.teams, key=lambda team: (-usd_of.get(team, 0.0), team))
        return [cost(team) for team in (["", *teams] if len(teams) == len(self.stage.teams) else teams)]

    def _receipt(self, run: "StoredRun", now: datetime) -> "tuple[Receipt | None] | None":
        """Return the receipt of a run that Batch has forgotten, or of a point. None if it cannot be read."""
        from jobs.core.run import submitted_at
        from jobs.runs.storage import read_receipt

        if run.run_id in self.settled:
            return (self.settled[run.run_id],)
        found = self._if_readable(f"cost of {run.run_id}", lambda: (read_receipt(self.aws, run.location),))
        if found is not None:
            newest = found[0].attempts[-1].last_seen_at if found[0] else submitted_at(run.run_id)
            if now - newest > _SETTLED:
                self.settled[run.run_id] = found[0]
        return found

    def _waiting(self) -> "list[Reason]":
        """Return why runs wait. Of a queue's runs, only the oldest is examined, because the others are behind it."""
        from jobs.report.dashboard import WAITING, Reason
        from jobs.runs.why import findings

        by_queue: dict[str, list[Job]] = {}
        for job in self.jobs:
            if job.state in WAITING:
                depends = job.state == "PENDING" and job.depends_on
                by_queue.setdefault("" if depends else job.queue, []).append(job)
        dependent = by_queue.pop("", [])
        found = [Reason(text="they wait for another run to end", runs=dependent)] if dependent else []
        for queue, jobs in by_queue.items():
            examine = partial(findings, self.aws, self.stage, jobs[-1])
            causes = self._if_readable(f"why runs wait in queue {queue}", examine) or ()
            first = next((finding for finding in causes if finding.verdict == "cause"), None)
            text = f", {first.about}: {first.text}" if first else ": unknown"
            found.append(Reason(text=f"queue {queue}{text}", runs=jobs, next_step=first.next_step if first else ""))
        return sorted(found, key=lambda reason: -len(reason.runs))

    def _if_readable(self, what: str, read: "Callable[[], ResultT]") -> "ResultT | None":
        """Return what `read` returns, or None if AWS or an unreadable file prevents it."""
        from jobs.aws.errors import error_code, explain
        from jobs.core.errors import TrainyardError

        try:
            return read()
        except Exception as error:
            explained = error if isinstance(error, TrainyardError) else explain(error)
            if explained is None:
                raise
            operation = getattr(error, "operation_name", "")
            reason = f"{error_code(error)} for {operation}" if operation else str(explained.args[0]).splitlines()[0]
            self.unknown.append((what, reason))
            return None

    def _unknown_lines(self) -> list[str]:
        """Return a line for each thing that is unknown; several with the same reason share a line."""
        by_reason: dict[str, list[str]] = {}
        for what, reason in dict.fromkeys(self.unknown):
            by_reason.setdefault(reason, []).append(what)
        return _first([f"{'; '.join(_first(each))}: unknown — {reason}" for reason, each in by_reason.items()])


def _first(texts: Sequence[str]) -> list[str]:
    """Return the first few texts, and the number of the others."""
    rest = len(texts) - _NAMED
    return [*texts[:_NAMED], *([f"and {rest} more"] if rest > 0 else [])]
