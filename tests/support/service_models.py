"""Read boto3's models of AWS's services once per process."""

import functools

import botocore.session


def share() -> None:
    """Let all sessions of this process share the models: megabytes of JSON, which each would read again."""
    botocore.session.create_loader = functools.cache(botocore.session.create_loader)
