"""What a training script of one's own asks of the platform; anywhere else each call works and does nothing.

    trainer = Trainer(…, callbacks=[trainyard.Callback()])               # for what is built on Hugging Face's Trainer
    trainer.train(resume_from_checkpoint=trainyard.checkpoint())

    run = trainyard.Run(total_steps=1000)                                # for a loop of one's own
    step = run.restore(model=model, optimizer=optimizer)
    while step < 1000 and not run.should_stop():
        …                                                                # one step
        step += 1
        run.step(step)
        run.log(step, loss=loss.item())
        if run.should_save():
            run.save(step, model=model, optimizer=optimizer)

    trainyard.busy(seconds=3600)                                         # before what takes long and is no hang

Inside the platform a Spot notice or SIGTERM ends the script at a step that is saved, and the next attempt goes on from
there; checkpoints are as frequent as they are worth; metrics, progress and heartbeats come along.
"""

from typing import TYPE_CHECKING, Any

from trainyard.heartbeat import busy
from trainyard.places import checkpoint, input_path, is_here, output, result
from trainyard.run import Run

if TYPE_CHECKING:
    from trainyard.transformers_callback import Callback

__all__ = ["Callback", "Run", "busy", "checkpoint", "input_path", "is_here", "output", "result"]


def __getattr__(name: str) -> Any:
    """Load what needs transformers when it is asked for."""
    if name == "Callback":
        from trainyard.transformers_callback import Callback

        return Callback
    raise AttributeError(f"module 'trainyard' has no attribute '{name}'")
