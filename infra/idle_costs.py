"""Compute what a stage costs while no job runs, from its templates and the prices in idle_costs.toml.

python -m infra.idle_costs     print a table of the stages of infra/settings.py; infra/docs/idle-costs.md has a summary
python -m infra.idle_costs --stage dev -o json     print a stage's total and its instance types as JSON
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import tomllib

from infra.app import build
from infra.rules.templates import Template
from infra.stages import Stage
from infra.stages.checks import selected_stages
from jobs.core.output import run_program
from jobs.money.prices import kept_prices

_UNITS_PER_MONTH = {"hour": 730, "month": 1, "GiB-month": 1}
"""AWS's convention for the hours of a month. Costs in other units depend on the amount of stored data."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """The price of one type of resource while idle: a row of idle_costs.toml, which describes the fields."""

    type: str
    what: str
    usd: float
    per: str
    turned_off_by: str
    source: str
    date: str
    times: str | None = None
    where: Mapping[str, Any] | None = None

    def applies_to(self, resource: Mapping[str, Any]) -> bool:
        """Return whether this is the price of a template's resource."""
        properties = resource.get("Properties", {})
        return resource["Type"] == self.type and all(
            properties.get(name) == value for name, value in (self.where or {}).items()
        )

    def usd_per_month(self, properties: Mapping[str, Any]) -> float | None:
        """Return the monthly cost of a resource, or None if it depends on the amount of stored data."""
        if self.per not in _UNITS_PER_MONTH:
            return None
        size = properties[self.times] if self.times and not isinstance(properties[self.times], list) else 1
        return self.usd * _UNITS_PER_MONTH[self.per] * float(size) * self.count(properties)

    def count(self, properties: Mapping[str, Any]) -> int:
        """Return how often a resource is paid: once per item if `times` is a list, such as an endpoint's subnets."""
        listed = properties.get(self.times) if self.times else None
        return len(listed) if isinstance(listed, list) else 1


PRICES = tuple(
    Price(**{**kept_prices().get(row["type"], {}), **row})
    for row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["price"]
)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A stage's resources with one price."""

    price: Price
    count: int
    usd_per_month: float | None
    """US dollars a month, or None if the cost depends on the amount of stored data."""


def idle_costs(templates: Sequence[Template]) -> list[Line]:
    """Return the costs of a stage's templates while no job runs."""
    resources = [resource for template in templates for resource in template["Resources"].values()]
    lines = []
    for price in PRICES:
        paid = [found.get("Properties", {}) for found in resources if price.applies_to(found)]
        if paid:
            costs = [price.usd_per_month(properties) for properties in paid]
            total = None if None in costs else sum(filter(None, costs))
            lines.append(Line(price=price, count=sum(map(price.count, paid)), usd_per_month=total))
    return lines


def table(stages: Mapping[str, Sequence[Line]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, with a row per price that any stage has, and a column per stage."""
    yield f"| resource | price | {' | '.join(f'`{stage}`, per month' for stage in stages)} | turned off by |"
    yield f"|---|---|{'---:|' * len(stages)}---|"
    for price in PRICES:
        found = [next((line for line in lines if line.price is price), None) for lines in stages.values()]
        if any(found):
            unit = f"${price.usd:g} per {price.per}"
            cells = " | ".join(map(_cell, found))
            yield f"| {price.what} | {unit} | {cells} | {price.turned_off_by} |"
    totals = (sum(line.usd_per_month or 0 for line in lines) for lines in stages.values())
    yield f"| **total, without storage** | | {' | '.join(f'**${total:.2f}**' for total in totals)} | |"


def _cell(line: Line | None) -> str:
    if line is None:
        return "none"
    return "by size" if line.usd_per_month is None else f"{line.count}: ${line.usd_per_month:.2f}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m infra.idle_costs", description="Print what a stage costs while idle."
    )
    parser.add_argument("--stage", help="a row of infra/settings.py (default: all)")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    context = json.loads((Path(__file__).parents[1] / "cdk.json").read_text())["context"]
    rows = selected_stages(options.stage)
    with tempfile.TemporaryDirectory() as directory:
        # Skip the CDK's own validation, which takes longer than everything else and does not affect costs.
        app = cdk.App(context=context, outdir=directory, builtin_cloud_formation_validation=False)
        build(app, rows)
        assembly = app.synth()
        stages = {
            row.name: idle_costs(
                [stack.template for stack in assembly.get_nested_assembly(f"assembly-{row.name}").stacks]
            )
            for row in rows
        }
    if options.output == "json":
        print(json.dumps([summary(row, stages[row.name]) for row in rows]))
    else:
        print("\n".join(table(stages)))


def summary(row: Stage, lines: Sequence[Line]) -> dict[str, Any]:
    """Return a stage's idle cost and instance types, from which `trainyard acceptance` plans a run."""
    return {
        "stage": row.name,
        "usd_a_month": sum(line.usd_per_month or 0 for line in lines),
        "instance_type": row.instance_types[0],
        "cpu_instance_type": row.cpu_instance_type,
        "builds_machine_image": row.pool.builds_machine_image,
        "several_nodes_on_demand": row.max_multinode_nodes > 1,
    }


if __name__ == "__main__":
    run_program(main)
