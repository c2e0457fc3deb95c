"""`trainyard acceptance`: a stage proven on its account, step by step.

command.py                        plan and price, ask once, run the steps, write the report
runner.py, spend.py, context.py   run and undo steps, record them, count money, start programs
deployment.py, runs.py, reclaim.py, fis.py, watched.py    the steps
"""
