"""The stack that offers instances to jobs: launch templates, compute environments and queues."""
