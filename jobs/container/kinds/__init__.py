"""The entrypoints of the kinds of jobs, one module for each kind."""
