"""The spec that a researcher writes, its keys, and the plan with its SubmitJob request. Pure."""
