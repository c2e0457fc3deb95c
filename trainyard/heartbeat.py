"""What a script says of its own pace, so that nobody takes it for hung."""

from trainyard.places import is_here


def busy(seconds: float) -> None:
    """Say that what comes next may take so long and is no hang: an evaluation, a download, a long computation.

    It holds until the next step of a Trainer with `trainyard.Callback`, or of a `trainyard.Run`; in other scripts for
    so many seconds from now on.
    """
    if is_here():
        from jobs.container.trainer.heartbeat import busy

        busy(seconds)
