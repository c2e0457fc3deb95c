"""The environment of an acceptance run: a stage with `dl1.24xlarge` at recorded prices."""

from pathlib import Path

from jobs.aws.connection import Aws
from jobs.cli.acceptance.context import Context, Facts
from jobs.core.instance_types import instance_type
from jobs.money.prices import recorded


def context_of() -> Context:
    facts = Facts(
        usd_a_month=39.8,
        instance_type="dl1.24xlarge",
        cpu_instance_type="m6i.4xlarge",
        builds_machine_image=True,
        several_nodes_on_demand=False,
    )
    prices = {name: recorded(instance_type(name)) for name in (facts.instance_type, facts.cpu_instance_type)}
    folder = Path("nowhere")
    return Context(aws=Aws(), stage="dev", keep=False, folder=folder, facts=facts, say=lambda _: None, prices=prices)
