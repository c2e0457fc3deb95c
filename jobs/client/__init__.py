"""The client of a stage: it asks AWS for the stage, its jobs, their logs, and the files of their runs."""
