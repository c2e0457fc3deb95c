"""The stack that keeps data, runs and secrets: what stays when all else is deleted."""
