"""`trainyard acceptance`: proves a stage on an account, once, from its deployment to its end.

command.py is what the command does, read from top to bottom: plan, ask, steps, undo, report. runner.py runs steps,
whatever they are; spend.py ends them at a limit; state.py remembers them. The steps are in deployment.py, runs.py,
reclaim.py, isolation.py and watched.py; fis.py is what reclaim.py asks. What of `infra` they need, they start as
programs of its own, since the command line may not import it.
"""
