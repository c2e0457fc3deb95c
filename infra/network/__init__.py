"""The stack of the network that jobs run in: a VPC of the stage's own, or one that is there already."""
