"""Surroundings of an acceptance run, of a stage with `dl1.24xlarge` at recorded prices."""

from pathlib import Path

from jobs.aws.connection import Aws
from jobs.cli.acceptance.context import Context, Facts
from jobs.contract.instance_types import instance_type
from jobs.contract.prices import recorded


def context_of(folder: Path = Path("nowhere")) -> Context:
    facts = Facts.of(
        {
            "usd_a_month": 39.8,
            "instance_type": "dl1.24xlarge",
            "cpu_instance_type": "m6i.4xlarge",
            "builds_machine_image": True,
            "several_nodes_on_demand": False,
        }
    )
    rows = [instance_type(name) for name in ("dl1.24xlarge", "m6i.4xlarge")]
    prices = {row.name: recorded(row) for row in rows}
    return Context(aws=Aws(), stage="dev", keep=False, folder=folder, say=lambda _: None, facts=facts, prices=prices)
