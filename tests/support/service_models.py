"""What boto3 knows of AWS's services, read once in a process."""

import functools

import botocore.session


def share() -> None:
    """Let all sessions of this process share it: it is megabytes of JSON, which each would read anew."""
    botocore.session.create_loader = functools.cache(botocore.session.create_loader)
