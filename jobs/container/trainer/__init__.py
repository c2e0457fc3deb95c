"""Run any kind of job with a Trainer that can be interrupted and resumed at any step.

training            runs an attempt of a recipe, step by step
trainer             extends the Trainer class of transformers or optimum-habana
components          the components that every training shares, and their order
script_trainer      `trainyard.Callback`: makes a script's Trainer resumable
script_loop         `trainyard.Run`: the same for a custom loop
script_platform     a script's rank, run and checkpoint
arguments           a recipe as arguments of the Trainer
determinism         repeats the same examples and sums in every attempt
evaluation          evaluations, the best of them, early stopping
halving             compares a sweep's point with the others
heartbeat           heartbeats for the launcher
trackers            Weights & Biases and MLflow

Saving and resuming are in jobs/container/saving.
"""
