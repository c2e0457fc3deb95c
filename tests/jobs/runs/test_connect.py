"""Tasks on AWS for ECS Exec. tests/jobs/cli/test_exec.py tests whole sessions."""

from jobs.runs.connect import Task


def test_cluster_is_taken_from_the_tasks_arn() -> None:
    # The ARN's format since 2021: Amazon ECS Developer Guide, Amazon Resource Names (ARNs) and IDs.
    arn = "arn:aws:ecs:us-east-1:123456789012:task/spot-research/0123456789abcdef0"
    assert Task(job_id="7f6b", arn=arn, container="job", allows_commands=True).cluster == "spot-research"
