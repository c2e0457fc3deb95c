"""The Trainer: its loop, checkpoints, background save, shutdown, metrics and heartbeat. It knows no kind of job."""
