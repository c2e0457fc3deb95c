"""The stacks that platform engineers deploy, their settings, and the emulator that accepts the same templates."""
