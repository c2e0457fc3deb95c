"""Train with a Trainer that can be interrupted and resumed at any step, whatever the kind of job.

training            runs an attempt of a recipe, step by step
trainer             makes the one Trainer class from transformers' or optimum-habana's
components          what every training shares, and the order in which it is called
script_trainer      `trainyard.Callback`: makes a script's Trainer resumable
script_loop         `trainyard.Run`: the same for a script's own loop
script_platform     a script's rank, run and checkpoint
arguments           a recipe as arguments of the Trainer
determinism         the same examples and sums in every attempt
evaluation          evaluations, the best of them, early stopping
halving             a point of a sweep compared with the others
heartbeat           heartbeats for the launcher
trackers            Weights & Biases and MLflow

What saves and resumes is in jobs/container/saving.
"""
