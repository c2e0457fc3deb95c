"""Training, whatever the kind of job: `training` runs an attempt step by step, `trainer` makes its one Trainer class,
and `accompanied` has what goes with it, in the order in which it is called.

Beside them is a module for each thing that an interruptible run needs: checkpoint, checkpoint_interval,
resume, background_save, shutdown, heartbeat, evaluation, metrics, determinism; and compat, for
what some releases leave open.
"""
