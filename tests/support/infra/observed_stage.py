"""A stage that is looked at through its observability stack, with ARNs worked out."""

import re
from typing import Any

from infra.stages import Alerts, Pool, Stage, Team
from tests.support.infra.deployed_roles import DeployedStage
from tests.support.infra.synthesis import Templates, resources, stacks_of

OLD_POOL = Pool(instance_type="p4d.24xlarge", release="1.23.0")
MEMBER = "arn:aws:iam::123456789012:role/somebody"
EVERYTHING: dict[str, Any] = {
    "max_on_demand_nodes": 2,
    "max_multinode_nodes": 2,
    "retiring": (OLD_POOL,),
    "monthly_budget_usd": 1000.0,
    "own_kms_key": True,
    "teams": (Team(name="research", monthly_budget_usd=100.0, member_principals=(MEMBER,)), Team(name="product")),
    "alerts": Alerts(emails=("a@example.org", "b@example.org"), failed_jobs_an_hour=5),
}


class Observed(DeployedStage):
    """The stack under test among the others of its stage."""

    def __init__(self, templates: Templates) -> None:
        super().__init__("test", templates)
        self.template = templates["observability"]

    def all(self, resource_type: str) -> dict[str, dict[str, Any]]:
        return {
            name: self.resolve("observability", properties)
            for name, properties in resources(self.template, resource_type).items()
        }

    def rule(self, beginning: str) -> dict[str, Any]:
        (found,) = (rule for name, rule in self.all("AWS::Events::Rule").items() if name.startswith(beginning))
        return found

    def watched(self, name: str) -> list[str]:
        """Return the ARNs of the queues that rules of that name, of which there may be several, get events of."""
        found = [
            rule for key, rule in self.all("AWS::Events::Rule").items() if re.match(rf"{name}\d?[0-9A-F]{{8}}$", key)
        ]
        assert all(rule["EventPattern"]["source"] == ["aws.batch"] for rule in found)
        return [queue for rule in found for queue in rule["EventPattern"]["detail"]["jobQueue"]]

    def environment(self, file: str) -> dict[str, str]:
        (found,) = (
            function["Environment"]["Variables"]
            for function in self.all("AWS::Lambda::Function").values()
            if function["Handler"] == f"{file}.handler"
        )
        return dict(found)

    def queues(self) -> dict[str, str]:
        """Return the ARNs of the queues that the compute stack publishes, by `queue/…`."""
        prefix = f"/trainyard/{self.stage}/"
        names = [
            str(parameter["Name"]).removeprefix(prefix)
            for parameter in resources(self._templates["compute"], "AWS::SSM::Parameter").values()
        ]
        return {name: self.published(name) for name in names if name.startswith(("queue/", "team-queue/"))}


def observed(**settings: Any) -> Observed:
    row = Stage(**{"name": "test", "teams": (Team(name="research"),), **settings})
    return Observed(stacks_of(row))
