"""What platform engineers deploy: settings, stacks, and the emulator that takes the same templates."""
