"""Functions that make a training script interruptible on trainyard. Outside the platform they have no effect.

With a Hugging Face Trainer, or anything built on one:

    trainer = Trainer(…, callbacks=[trainyard.Callback()])
    trainer.train(resume_from_checkpoint=trainyard.checkpoint())

With your own training loop:

    run = trainyard.Run(total_steps=1000)
    step = run.restore(model=model, optimizer=optimizer)
    while step < 1000 and not run.should_stop():
        …                                                                # train one step
        step += 1
        run.step(step)
        run.log(step, loss=loss.item())
        if run.should_save():
            run.save(step, model=model, optimizer=optimizer)

In any script:

    data = trainyard.input_path("reviews", default="reviews.csv")        # an input of the spec
    folder = trainyard.output()                                          # files here are kept with the run
    trainyard.busy(seconds=3600)                                         # before a long pause that is not a hang
    trainyard.result(accuracy=0.93)                                      # shown in receipts and comparisons

On a laptop or in a notebook, `trainyard.submit` and `trainyard.runs` submit and follow runs (trainyard/client.py).

Inside the platform, a Spot notice or SIGTERM stops the script at a saved step, from which the next attempt resumes. The
interval between checkpoints follows from their cost. Metrics, progress and heartbeats are reported.
"""

from typing import TYPE_CHECKING, Any

from trainyard.run import Run
from trainyard.script import busy, checkpoint, input_path, is_here, output, result

if TYPE_CHECKING:
    from trainyard.callback import Callback
    from trainyard.client import (
        JobFailedError,
        RunHandle,
        TimedOutError,
        TrainyardError,
        UsageError,
        find_run,
        plan,
        runs,
        submit,
    )

__all__ = [
    "Callback",
    "JobFailedError",
    "Run",
    "RunHandle",
    "TimedOutError",
    "TrainyardError",
    "UsageError",
    "busy",
    "checkpoint",
    "find_run",
    "input_path",
    "is_here",
    "output",
    "plan",
    "result",
    "runs",
    "submit",
]


_OF_THE_CLIENT = (
    "JobFailedError",
    "RunHandle",
    "TimedOutError",
    "TrainyardError",
    "UsageError",
    "find_run",
    "plan",
    "runs",
    "submit",
)


def __getattr__(name: str) -> Any:
    """Import Callback, which needs transformers, and the client, which needs boto3, only when they are used."""
    if name == "Callback":
        from trainyard.callback import Callback

        return Callback
    if name in _OF_THE_CLIENT:
        try:
            from trainyard import client
        except ModuleNotFoundError as error:
            raise ImportError(
                f"trainyard.{name} needs {error.name}. Next: pip install --editable 'REPOSITORY[client]'"
            ) from error

        return getattr(client, name)
    raise AttributeError(f"module 'trainyard' has no attribute '{name}'")
