"""The function that the machine image stack calls during its deployment."""
