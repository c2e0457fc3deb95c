"""The stack of alerts, metrics, moves to On-Demand and budget stops; its functions/ run in Lambda."""
