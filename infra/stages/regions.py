"""The regions of AWS: which names are some, and how the ids of their zones begin."""

import re
from difflib import SequenceMatcher

REGIONS = (
    *("us-east-1", "us-east-2", "us-west-1", "us-west-2", "ca-central-1", "ca-west-1", "mx-central-1", "sa-east-1"),
    *("eu-central-1", "eu-central-2", "eu-north-1", "eu-south-1", "eu-south-2", "eu-west-1", "eu-west-2", "eu-west-3"),
    *("af-south-1", "il-central-1", "me-central-1", "me-south-1", "ap-east-1", "ap-east-2", "ap-south-1", "ap-south-2"),
    *("ap-northeast-1", "ap-northeast-2", "ap-northeast-3", "ap-southeast-1", "ap-southeast-2", "ap-southeast-3"),
    *("ap-southeast-4", "ap-southeast-5", "ap-southeast-6", "ap-southeast-7"),
    *("cn-north-1", "cn-northwest-1", "us-gov-east-1", "us-gov-west-1", "eusc-de-east-1"),
    *("us-iso-east-1", "us-iso-west-1", "us-isob-east-1", "us-isob-west-1", "us-isof-east-1", "us-isof-south-1"),
    "eu-isoe-west-1",
)
"""Those of EC2's endpoints in botocore 1.44.5, read in November 2026, to suggest one for a name that is none."""

_AREAS = r"us|eu|ap|sa|ca|me|af|il|mx|cn|us-gov|us-iso[bf]?|eu-isoe|eusc-[a-z]{2}"
"""How the names of each partition's regions begin, as botocore 1.44.5 has it in its partitions.json."""
_NAME = re.compile(
    rf"(?P<area>{_AREAS})-(?P<direction>central|north(?:east|west)?|south(?:east|west)?|east|west)-(?P<number>[1-9][0-9]?)"
)
_SHORT_DIRECTIONS = {"northeast": "ne", "northwest": "nw", "southeast": "se", "southwest": "sw"}
_CLOSE = 0.75
"""Similarity, from 0 to 1, from which on a region may be what was meant."""


def is_region(name: str) -> bool:
    """Return whether AWS has such a region, or may have opened it since the list above was made."""
    return _NAME.fullmatch(name) is not None


def closest_regions(name: str) -> list[str]:
    """Return the known regions whose names are most like this one: several where they are equally close, or none."""
    likeness = {region: SequenceMatcher(None, name.lower(), region).ratio() for region in REGIONS}
    best = max(likeness.values())
    return [region for region in REGIONS if likeness[region] == best >= _CLOSE]


def zone_prefix(region: str) -> str | None:
    """Return what the ids of the region's zones begin with, such as 'use1'; None where that is not known.

    AWS lists the ids in "Regions and Availability Zones", but not those of its isolated and sovereign regions.
    """
    parts = _NAME.fullmatch(region)
    if parts is None or re.search("iso|eusc", parts["area"]):
        return None
    area = "usg" if parts["area"] == "us-gov" else parts["area"]
    return area + _SHORT_DIRECTIONS.get(parts["direction"], parts["direction"][0]) + parts["number"]
