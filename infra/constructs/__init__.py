"""Code that several stacks share; it imports no stack."""
