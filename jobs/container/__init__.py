"""The code that runs inside a job's container: launcher, saving, trainer, data, models, kinds, scripts."""
