"""Write jobs/core/instance_types.json, the instance types that a stage can train on, from EC2's answers.

python -m jobs.money.instance_types                       ask again about every type
python -m jobs.money.instance_types --add g6e.24xlarge    ask about one more type, too

The calls need ec2:DescribeInstanceTypes and ec2:DescribeInstanceTypeOfferings. Prices need pricing:GetProducts and
ec2:DescribeSpotPriceHistory; where AWS gives no price, the recorded one stays. So does the row of a type that EC2 does
not list. Fields are from the API reference of DescribeInstanceTypes.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from jobs.aws.connection import Aws
from jobs.aws.errors import explain, is_loopback
from jobs.core import instance_types as recorded
from jobs.core.errors import ConfigurationError, NotFoundError, UsageError
from jobs.core.output import run_program
from jobs.money.aws_prices import on_demand_quote, spot_prices

_PRICES_REGION = "us-east-1"
_ZONE_ID = re.compile(r"[a-z]+\d-az\d+")
"""Ids of a region's own zones. Local Zones, where stages have no subnets, have a part more (`use1-atl2-az1`)."""


def main(arguments: list[str] | None = None) -> int:
    """Write the file. Raises TrainyardError."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.money.instance_types", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--add", metavar="TYPE", nargs="+", default=[], help="instance types to add (default: none)")
    parser.add_argument("--profile", help="AWS profile (default: AWS_PROFILE)")
    parser.add_argument(
        "--source", help="source of the answers (default: EC2 and today's date; required for an emulator)"
    )
    options = parser.parse_args(arguments)
    rows: dict[str, dict[str, Any]] = json.loads(recorded.PATH.read_text(encoding="utf-8"))["types"]
    regions = sorted({region for row in rows.values() for region in row.get("zone_ids", {})})
    aws = {region: Aws(profile=options.profile, region=region) for region in regions}
    source = options.source or f"EC2, {datetime.now(timezone.utc):%Y-%m-%d}"
    if options.source is None and is_loopback(aws[_PRICES_REGION].endpoint):
        raise UsageError("an emulator's answers are not EC2's", next_step="name their source with --source")
    names = {*rows, *options.add}
    try:
        found, zones = _described(aws, names), _zones(aws, names)
    except Exception as error:
        raise explain(error) or error from error
    if missing := [name for name in options.add if name not in found]:
        raise NotFoundError(f"EC2 lists no {', '.join(missing)} in {', '.join(regions)}", next_step="check the name")
    new, unpriced = {}, []
    for name in [*rows, *(name for name in options.add if name not in rows)]:
        old = rows.get(name, {})
        if name not in found:
            sys.stderr.write(f"{name}: EC2 does not list it; its row stays\n")
            new[name] = old
            continue
        for what, value, table in (
            ("family", name.partition(".")[0], "QUOTAS"),
            ("card", found[name].get("card_model"), "CARDS"),
        ):
            if value not in getattr(recorded, table):
                raise ConfigurationError(
                    f"{name}: its {what} {value} is new",
                    next_step=f"add a row to {table} in jobs/core/instance_types.py",
                )
        prices = _prices(aws[_PRICES_REGION], name)
        if prices is None:
            prices = {key: value for key, value in old.items() if "usd" in key or key.startswith("price_")}
            unpriced.append(name)
        if not prices:
            raise ConfigurationError(f"{name}: AWS gave no price", next_step=_next_step(aws[_PRICES_REGION]))
        new[name] = {**found[name], "zone_ids": zones.get(name, {}), **prices}
    if unpriced:
        sys.stderr.write(f"AWS gave no price of {', '.join(unpriced)}; the recorded ones stay\n")
    recorded.PATH.write_text(_text(source, new), encoding="utf-8")
    return 0


def _text(source: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the file's text: a line per field and row, so that a change of one value is one line of a diff."""
    lines = []
    for name, row in rows.items():
        values = ",\n".join(f"      {json.dumps(key)}: {json.dumps(value)}" for key, value in row.items())
        lines.append(f"    {json.dumps(name)}: {{\n{values}\n    }}")
    return f'{{\n  "source": {json.dumps(source)},\n  "types": {{\n' + ",\n".join(lines) + "\n  }\n}\n"


def _described(aws: Mapping[str, Aws], names: set[str]) -> dict[str, dict[str, Any]]:
    """Return EC2's own data of the types that it lists in any of the regions."""
    found: dict[str, dict[str, Any]] = {}
    for connection in aws.values():
        # A filter, because EC2 refuses the whole request if one of the named types is unknown to it.
        pages = connection.ec2.get_paginator("describe_instance_types").paginate(
            Filters=[{"Name": "instance-type", "Values": sorted(names)}]
        )
        for page in pages:
            for item in page["InstanceTypes"]:
                found.setdefault(item["InstanceType"], dict(_values(item)))
    return found


def _values(item: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "vcpus", item["VCpuInfo"]["DefaultVCpus"]
    yield "memory_mib", item["MemoryInfo"]["SizeInMiB"]
    for gpu in item.get("GpuInfo", {}).get("Gpus", ()):
        yield "accelerators", gpu["Count"]
        yield "card_model", gpu["Name"]
        yield "card_memory_mib", gpu["MemoryInfo"]["SizeInMiB"]
    network = item["NetworkInfo"]
    if efa := network.get("EfaInfo", {}).get("MaximumEfaInterfaces"):
        # The answer tells how many cards have EFA, but not which. If one has none, it is the first, for the instance's
        # own traffic (EC2 User Guide, "Maximize network bandwidth on instances with multiple network cards": P6-B300).
        cards = network["MaximumNetworkCards"]
        yield "efa_cards", list(range(cards - efa, cards))
    if disks := item.get("InstanceStorageInfo", {}).get("Disks"):
        yield "nvme_disks", sum(disk["Count"] for disk in disks)


def _zones(aws: Mapping[str, Aws], names: set[str]) -> dict[str, dict[str, list[str]]]:
    """Return the ids of the zones that offer each type, by region. Regions without any are missing."""
    zones: dict[str, dict[str, list[str]]] = {}
    for region, connection in aws.items():
        pages = connection.ec2.get_paginator("describe_instance_type_offerings").paginate(
            LocationType="availability-zone-id", Filters=[{"Name": "instance-type", "Values": sorted(names)}]
        )
        for page in pages:
            for item in page["InstanceTypeOfferings"]:
                if _ZONE_ID.fullmatch(item["Location"]):
                    zones.setdefault(item["InstanceType"], {}).setdefault(region, []).append(item["Location"])
    return {name: {region: sorted(ids) for region, ids in found.items()} for name, found in zones.items()}


def _prices(aws: Aws, name: str) -> dict[str, Any] | None:
    """Return today's prices, or None if AWS gives none."""
    on_demand, by_zone = on_demand_quote(aws, name), spot_prices(aws, name)
    if on_demand and by_zone:
        return {
            "on_demand_usd_per_hour": on_demand.usd_per_hour,
            "spot_usd_per_hour": round(statistics.median(by_zone.values()), 4),
            "price_date": on_demand.date,
            "price_source": f"{on_demand.source}; EC2's Spot price history there, the median of the zones",
        }
    return None


def _next_step(aws: Aws) -> str:
    if is_loopback(aws.endpoint):
        return "use the credentials of an AWS account: an emulator has no prices"
    return "allow pricing:GetProducts and ec2:DescribeSpotPriceHistory"


if __name__ == "__main__":
    sys.exit(run_program(main))
