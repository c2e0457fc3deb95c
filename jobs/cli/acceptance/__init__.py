"""`trainyard acceptance`: proves that a stage works on its account, step by step.

command.py                                  plan, price, confirm, run the steps, write the report
runner.py, context.py                       run and undo steps, record them, count money; what steps share
deployment.py, runs.py, reclaim.py, watched.py    the steps
"""
