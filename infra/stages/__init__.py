"""What a stage may be: its fields (model), the limits of each value (limits), and what must fit together (checks)."""

from infra.stages.model import Alerts, CapacityReservation, ExistingVpc, GitHub, Pool, Stage, Team

__all__ = ["Alerts", "CapacityReservation", "ExistingVpc", "GitHub", "Pool", "Stage", "Team"]
