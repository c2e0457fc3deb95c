"""What several stacks share. Nothing here imports a stack."""
