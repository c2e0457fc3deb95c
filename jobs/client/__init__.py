"""The client of a stage: it asks AWS for the stage, its jobs, logs and files of runs, and reckons what those cost."""
