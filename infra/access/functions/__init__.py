"""The function that the access stack calls during its deployment."""
