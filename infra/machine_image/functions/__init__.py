"""The function that the stack of AMIs calls while it is deployed."""
