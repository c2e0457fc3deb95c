"""CloudTrail's record of events, which is empty here.

The CDK CLI asks for it to explain a failed deployment; moto has no answer, and the CLI asks again for half a minute.
"""

import json

from moto.cloudtrail.responses import CloudTrailResponse


def install() -> None:
    """Answer LookupEvents. Call it before the server starts."""
    CloudTrailResponse.lookup_events = _lookup_events


def _lookup_events(_response: CloudTrailResponse) -> str:
    return json.dumps({"Events": []})
