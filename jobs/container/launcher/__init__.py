"""The launcher: from Batch's environment to ranks, watched until they end."""
