"""EC2's GetSpotPlacementScores, which moto does not have: always the recorded answer.

Source: the output in aws/aws-cli, awscli/examples/ec2/get-spot-placement-scores.rst.
"""

from moto.core.responses import ActionResult
from moto.ec2.responses import EC2Response

REGION_SCORE, ZONE_SCORE = 7, 8


def install() -> None:
    """Add the operation. Call it before the server starts."""
    EC2Response.get_spot_placement_scores = _answer


def _answer(response: EC2Response) -> ActionResult:
    scores = {"Region": response.region, "Score": REGION_SCORE}
    if str(response._get_param("SingleAvailabilityZone")).lower() == "true":  # noqa: SLF001 - as moto's operations do
        scores = {"Region": response.region, "AvailabilityZoneId": "use1-az1", "Score": ZONE_SCORE}
    return ActionResult({"SpotPlacementScores": [scores]})
