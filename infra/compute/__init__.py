"""Offer instances to jobs: launch templates, compute environments and queues."""
