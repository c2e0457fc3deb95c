"""A stage with many runs in all states, as its page shows it, and a sweep."""

import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone

from jobs.core.output import Progress
from jobs.core.records import Attempt, CardUse
from jobs.core.run import new_run_id
from jobs.report.dashboard import Board, MonthlyCost, Reason, ShownRun
from jobs.report.sweep_page import SweepPoint, SweepSummary
from jobs.runs.job import Job, JobAttempt
from jobs.runs.recorded_run import RecordedRun
from jobs.runs.sweeps import STOPPED_EARLY
from tests.support.jobs.recorded_runs import job_of, three_attempts

NOW = datetime(2026, 11, 24, 15, 30, tzinfo=timezone.utc)
TEAMS = ("research", "product", "speech", "search")
NAMES = ("massive", "bert-large", "reviews", "mistral-lora", "tokenize-wiki", "rates", "summaries")
KINDS = ("finetune-classification", "pretrain-mlm", "script", "script", "tokenize", "evaluate", "script")
FAILURES = (
    "rank 3 of node 0: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.5 GiB. Next: lower batch sizes",
    "rank 0 of node 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 812 MiB. Next: lower batch sizes",
    "rank 0 of node 0: ValueError: column 'label' has 3 values that the training data lacks",
    "budget: 20.00 USD of max_usd 20.00 used, at the recorded Spot price, in 5.10 instance hours; nothing is left",
)


def board(count: int = 1000, *, unknown: Sequence[str] = ()) -> Board:
    """Return a stage with `count` runs of the last two weeks, of which a tenth has not ended."""
    chance = random.Random(count)
    states = [
        *(["RUNNING"] * max(1, count // 30) + ["STARTING"] + ["RUNNABLE"] * max(2, count // 60) + ["PENDING"] * 2),
        *chance.choices(("SUCCEEDED", "FAILED", "CANCELLED"), (85, 10, 5), k=count),
    ][:count]
    runs = [_run(number, state, chance) for number, state in enumerate(states)]
    waiting = [run.job for run in runs if run.job.state == "RUNNABLE"]
    limit = "16 of at most 16 instances of dl1.24xlarge are in use (jobs: research 9, product 7)"
    reasons = [
        Reason(
            text=f"queue spot, instance limit: {limit}",
            runs=waiting,
            next_step="wait for a job to end, or raise the limit",
        ),
        Reason(text="they wait for another run to end", runs=[run.job for run in runs if run.job.state == "PENDING"]),
    ]
    return Board(
        stage="prod",
        emulated=False,
        now=NOW,
        runs=runs,
        teams=TEAMS,
        costs=[
            MonthlyCost(name="stage prod", usd=8412.30, budget_usd=12_000, is_partial=bool(unknown)),
            MonthlyCost(name="research", usd=4120.55, budget_usd=5000),
            MonthlyCost(name="product", usd=3008.2, budget_usd=3000, is_stopped=True),
            MonthlyCost(name="speech", usd=1283.55),
            MonthlyCost(name="search", usd=None if unknown else 0.0, budget_usd=500),
        ],
        waiting=[reason for reason in reasons if reason.runs],
        unknown=unknown,
    )


def _run(number: int, state: str, chance: random.Random) -> ShownRun:
    created_at = NOW - timedelta(minutes=7 + number * 19)
    kind = number % len(NAMES)
    run_id = new_run_id(NAMES[kind], now=created_at)
    failed, ended = state == "FAILED", state in ("SUCCEEDED", "FAILED", "CANCELLED")
    attempt = JobAttempt(
        number=1,
        started_at=created_at,
        stopped_at=created_at + timedelta(hours=2) if ended else None,
        exit_code=1 if failed else None,
        reason="Essential container in task exited" if failed else "",
        log_stream=None,
    )
    reclaimed = replace(attempt, exit_code=75, reason="Host EC2 (instance i-0a1b) terminated.")
    started = ended or state == "RUNNING"
    attempts = [*[reclaimed] * chance.choice((0, 0, 0, 1, 2)), attempt] if started else []
    job: Job = replace(
        job_of(run_id, state=state, created_at=created_at, points=9 if NAMES[kind] == "rates" else 0),
        id=f"job-{number}",
        team=TEAMS[number % 3],
        kind=KINDS[kind],
        submitter=f"assumed-role/research/{chance.choice(('alice', 'bo', 'chen.li', 'dagny'))}",
        reason="cancelled by user/alice: wrong data" if state == "CANCELLED" else "",
        attempts=tuple(attempts),
        stopped_at=created_at + timedelta(hours=2) if ended else None,
        depends_on=("job-0",) if state == "PENDING" else (),
    )
    steps = chance.randrange(200, 9000)
    done = chance.randrange(1, 9)
    points = (9 if ended else done, 9) if job.points else None
    shown = ShownRun(job=job, points=points, usd=chance.uniform(0.2, 60) if started else None)
    if state == "RUNNING" and number != 2:
        progress = Progress(step=steps, total_steps=9000, note=f"loss 0.41, {chance.randrange(2, 50)} min left")
        return replace(shown, progress=progress, working=[_attempt(chance)])
    if failed:
        return replace(shown, ended_by=chance.choice(FAILURES))
    return replace(shown, metric=("eval_accuracy", chance.uniform(0.7, 0.95)) if state == "SUCCEEDED" else None)


def _attempt(chance: random.Random) -> Attempt:
    recorded = three_attempts(20, end="running").attempts[-1]
    busy = chance.uniform(70, 98)
    cards = CardUse(utilization_percent=busy, memory_percent=60, mean_utilization_percent=busy, idle_seconds=0)
    return recorded.model_copy(update={"cards": cards})


def sweep_summary(points: Sequence[SweepPoint], *, state: str = "running") -> SweepSummary:
    done = sum(point.state == "succeeded" for point in points)
    return SweepSummary(
        run_id="rates-20261101-120000-00ac",
        team="research",
        job="finetune-classification",
        state=state,
        metric="eval_accuracy",
        progress=f"{done} of {len(points)} points done, 2 failed, 3 running",
        reason="",
        budget="78.12 of 200.00 USD",
        best=points[0].run.run_id if done else None,
    )


def sweep_points(count: int = 20) -> list[SweepPoint]:
    """Return the points of a sweep, the best first: most have succeeded, and the others are in all other states."""
    states = ["succeeded"] * (count - 8) + ["running"] * 3 + [STOPPED_EARLY] * 2 + ["waiting", "failed", "failed"]
    found = []
    for place, state in enumerate(states):
        accuracy = 0.9 - 0.03 * place
        rate = float(f"{3e-5 * 1.3**place:.3g}")
        run = three_attempts(
            100,
            run_id=f"rates-p{place + 1:02d}-20261101-120000-00ab",
            learning_rate=rate,
            accuracy=accuracy,
            end="running" if state == "running" else "succeeded",
        )
        started = state != "waiting"
        found.append(
            SweepPoint(
                number=1 + (place * 7) % count,
                values={"learning_rate": rate, "seed": place % 3 + 1, "parameters.schedule": "cosine"},
                state=state,
                reason={STOPPED_EARLY: "ranked 5 of 6 at step 100", "failed": FAILURES[place % 2]}.get(state, ""),
                metric=("eval_accuracy", accuracy) if state in ("succeeded", STOPPED_EARLY) else None,
                usd=6.24 - 0.2 * place if started else None,
                run=replace(run, utilization=())
                if started
                else RecordedRun(run_id=run.run_id, team=run.team, location=""),
            )
        )
    return found
