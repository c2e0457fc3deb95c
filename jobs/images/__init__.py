"""Build, test, push and list container images."""
