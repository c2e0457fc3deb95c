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

Inside the platform, a Spot notice or SIGTERM stops the script at a saved step, from which the next attempt resumes. The
interval between checkpoints follows from their cost. Metrics, progress and heartbeats are reported.
"""

from typing import TYPE_CHECKING, Any

from trainyard.run import Run
from trainyard.script import busy, checkpoint, input_path, is_here, output, result

if TYPE_CHECKING:
    from trainyard.callback import Callback

__all__ = ["Callback", "Run", "busy", "checkpoint", "input_path", "is_here", "output", "result"]


def __getattr__(name: str) -> Any:
    """Import Callback, which needs transformers, only when it is used."""
    if name == "Callback":
        from trainyard.callback import Callback

        return Callback
    raise AttributeError(f"module 'trainyard' has no attribute '{name}'")
