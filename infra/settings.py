"""What your organisation deploys: its teams, and a row of STAGES for each environment.

cdk deploy 'dev/*' -c stage=dev     deploys what the row `dev` says

infra/stages/model.py describes every field, with its default and its limits.
"""

from infra.stages import Stage, Team

TEAMS = (Team(name="research"), Team(name="product"))

# Limits such as `max_nodes` count for each team: none shares its instances unless it says `shares_instances=True`.
STAGES = {
    stage.name: stage
    for stage in (
        # Without an `instance_type` it is dl1.24xlarge, which EC2's API has not listed since mid-2026. With NVIDIA's:
        #   Stage(name="dev", teams=TEAMS, max_nodes=2, instance_type="p4d.24xlarge"),
        Stage(name="dev", teams=TEAMS, max_nodes=2),
        Stage(
            name="prod",
            teams=TEAMS,
            # Jobs of several nodes live in one zone: that of this region which is known to offer the instances.
            region="us-east-1",
            max_nodes=16,
            max_on_demand_nodes=4,
            max_multinode_nodes=4,
            termination_protection=True,
        ),
    )
}
