"""The spec that a researcher writes, what it may say, and the way to the plan and its SubmitJob request. Pure."""
