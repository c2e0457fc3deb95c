"""What an image says of itself: its labels, its user, its variables, its command."""

import os
import re
import subprocess
from typing import Any

SECRET = re.compile(
    r"(\b\w*(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE_KEY)\w*)=\S+", re.IGNORECASE
)
PASSWORD_IN_URL = re.compile(r"://[^/@\s:]+:[^/@\s]+@")


def test_labels_are_those_of_the_release_and_revision(facts: dict[str, Any]) -> None:
    labels = facts["labels"]
    assert {name: labels["found"].get(name) for name in labels["expected"]} == labels["expected"]


def test_it_runs_as_the_user_that_its_dockerfile_names(facts: dict[str, Any]) -> None:
    assert (os.getuid(), os.getgid()) == (facts["user"], facts["user"])


def test_no_variable_and_no_step_of_its_history_looks_like_a_secret(facts: dict[str, Any]) -> None:
    texts = [*facts["environment"], *facts["history"]]
    found = [name for text in texts for name in SECRET.findall(text)]  # names only: this is printed
    found += ["a password in a URL" for text in texts if PASSWORD_IN_URL.search(text)]
    assert found == []


def test_its_own_command_is_the_help_of_the_launcher_without_an_entrypoint(facts: dict[str, Any]) -> None:
    assert not facts["entrypoint"], "a job definition names the whole command"
    done = subprocess.run(facts["command"], cwd="/", capture_output=True, text=True, check=False)
    assert "jobs.container.launch" in done.stdout, done.stderr
    assert "job kinds" in done.stdout
