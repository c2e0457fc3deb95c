"""Tell people what happens, move jobs off Spot, and stop at a budget; what runs in Lambda is in functions/."""
