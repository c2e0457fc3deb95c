"""The contract between laptop, stacks and container: pydantic and Python's own library, nothing else."""
