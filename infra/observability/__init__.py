"""The stack that tells people what happens, moves jobs off Spot and stops at a budget; functions/ runs in Lambda."""
