"""What the command line asks of AWS: a stage, its jobs, their logs, and the files of their runs."""
