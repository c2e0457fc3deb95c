"""The settings of your organisation: its teams, and one row of STAGES per environment.

cdk deploy 'dev/*' -c stage=dev     deploy the stage `dev`

infra/stages/model.py describes every field, its default and its limits.
"""

from infra.stages import Stage, Team

TEAMS = (Team(name="research"), Team(name="product"))

# Limits such as `max_nodes` apply to each team separately, unless teams set `shares_instances=True`.
STAGES = {
    stage.name: stage
    for stage in (
        # The default type is dl1.24xlarge, which EC2's API has not listed since mid-2026. For NVIDIA:
        #   Stage(name="dev", teams=TEAMS, max_nodes=2, instance_types=("p4d.24xlarge",)),
        Stage(name="dev", teams=TEAMS, max_nodes=2),
        Stage(
            name="prod",
            teams=TEAMS,
            # A multi-node job runs in one zone: the first with capacity, of this region's that offer the instances.
            region="us-east-1",
            max_nodes=16,
            max_on_demand_nodes=4,
            max_multinode_nodes=4,
            termination_protection=True,
        ),
    )
}
