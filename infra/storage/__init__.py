"""The stack that keeps data, runs and secrets, even after everything else is deleted."""
