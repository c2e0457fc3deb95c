"""The pieces that stacks are made of."""
