"""Job definitions of every team and kind: the reviewed template, and variants of settings."""

import json
from dataclasses import replace
from typing import Any

from infra.settings import STAGES, TEAMS
from infra.stages import Stage, Team
from jobs.core.stage import DeployedStage
from jobs.spec.catalog import CATALOG
from tests.support.infra.goldens import assert_as_reviewed
from tests.support.infra.synthesis import Templates, flatten, resources, up_to

DEFINITION = "Jobresearchfinetuneclassification"
PLAIN = Stage(name="test", teams=(Team(name="research"),))


def test_the_template_is_as_reviewed(reviewed: Templates) -> None:
    # At each change, CloudFormation would deregister the old revision of a definition, and its waiting jobs would fail.
    assert_as_reviewed(reviewed, "jobs")


def container_of(template: dict[str, Any], definition: str) -> dict[str, Any]:
    (task,) = resources(template, "AWS::Batch::JobDefinition")[definition]["EcsProperties"]["TaskProperties"]
    (container,) = task["Containers"]
    return dict(container)


def test_published_parameters_are_what_a_submission_reads(templates: Templates) -> None:
    parameters = {
        item["Name"].removeprefix("/trainyard/dev/"): flatten(item["Value"])
        for path, template in templates.items()
        if path.startswith("dev/")
        for item in resources(template, "AWS::SSM::Parameter").values()
    }
    stage = DeployedStage.from_parameters("dev", parameters)
    assert set(stage.queues) == {"spot@research", "cpu-spot@research", "spot@product", "cpu-spot@product"}
    assert stage.teams == ("product", "research")
    assert stage.instance_type.name == STAGES["dev"].instance_types[0]
    # Without capacity there are no multi-node definitions; without principals, no member roles.
    definitions = {name for name in parameters if name.startswith("job-definition")}
    assert definitions == {f"job-definition/{team.name}/{kind}" for team in TEAMS for kind in CATALOG}
    assert not any(name.startswith("member-role") for name in parameters)


def test_jobs_run_the_configured_image_tag() -> None:
    jobs = up_to("jobs", replace(PLAIN, image_tag="1.21.0-0123456789ab"))["jobs"]
    image = json.dumps(container_of(jobs, DEFINITION)["Image"])
    for name, parameter in jobs["Parameters"].items():
        image = image.replace(name, str(parameter.get("Default")))
    assert "/trainyard/test/image-repository/gaudi" in image
    assert image.endswith(':1.21.0-0123456789ab"]]}')
    published = {item["Name"]: item["Value"] for item in resources(jobs, "AWS::SSM::Parameter").values()}
    assert published["/trainyard/test/image-tag"] == "1.21.0-0123456789ab"


def test_jobs_request_their_gpus(variants: Templates) -> None:
    # Unlike HPUs, GPUs are a Batch resource, and a container only sees the GPUs it requests.
    for stage, gpus in (("g5-4xlarge", "1"), ("p4d-24xlarge", "8")):
        container = container_of(variants[f"{stage}/jobs"], DEFINITION)
        assert {"Type": "GPU", "Value": gpus} in container["ResourceRequirements"]
        # Without a file system, no shared data is mounted.
        assert [item["ContainerPath"] for item in container["MountPoints"]] == ["/scratch"]
