"""Put jobs into a VPC: the stage's own, or one that is there already."""
