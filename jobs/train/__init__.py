"""The only code that runs inside the container: it gets arguments and environment, and writes under its run."""
