"""Tasks that are entered on AWS. What a session shows is in tests/jobs/cli/test_exec.py."""

from jobs.runs.entering import Task


def test_the_cluster_is_named_in_the_arn_of_the_task() -> None:
    # The ARN's format since 2021: Amazon ECS Developer Guide, Amazon Resource Names (ARNs) and IDs.
    arn = "arn:aws:ecs:us-east-1:123456789012:task/spot-research/0123456789abcdef0"
    assert Task(job_id="7f6b", arn=arn, container="job", lets_commands_in=True).cluster == "spot-research"
