"""What your organisation deploys: its teams, and a row of STAGES for each environment.

cdk deploy 'dev/*' -c stage=dev     deploys what the row `dev` says

infra/stages/model.py describes every field, with its default and its limits.
"""

from infra.stages import Stage, Team

TEAMS = (Team(name="research"), Team(name="product"))

STAGES = {
    stage.name: stage
    for stage in (
        Stage(name="dev", teams=TEAMS, max_nodes=2),
        Stage(
            name="prod",
            teams=TEAMS,
            max_nodes=16,
            max_on_demand_nodes=4,
            max_multinode_nodes=4,
            termination_protection=True,
        ),
    )
}
