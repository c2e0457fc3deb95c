"""The entrypoints, one a kind of job: a module, or a folder with its entrypoint.py."""
