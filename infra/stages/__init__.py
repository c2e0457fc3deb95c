"""The settings of a stage: fields (model), limits of single values (limits), and checks across fields (checks)."""

from infra.stages.model import Alerts, CapacityReservation, ExistingVpc, GitHub, Pool, Proxy, Stage, Team

__all__ = ["Alerts", "CapacityReservation", "ExistingVpc", "GitHub", "Pool", "Proxy", "Stage", "Team"]
