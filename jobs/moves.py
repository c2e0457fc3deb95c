"""A run that Spot keeps taking away, or has no capacity for, goes on as a second job On-Demand: what names such a move.

The function that moves it (infra/functions/move_to_on_demand.py) ends the first job with a reason, and submits the
second under the same name with a tag; the command line knows both by what is here.
"""

RECLAIM_REASON = "Host EC2"
"""Begins Batch's own reason of an attempt whose instance was taken away."""

MOVED_REASON = "moved to On-Demand"
"""Begins the reason of a job that was ended to go on elsewhere."""

MOVED_TAG = "trainyard:moved"
"""Tag of the job that goes on; its value completes "moved to On-Demand …"."""

DUPLICATE_REASON = "duplicate of"
"""Begins the reason of a job that was never the run: a lost submission that arrived late."""
