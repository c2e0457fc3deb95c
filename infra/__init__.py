"""What platform engineers deploy: settings, stacks, and the embedded AWS that takes the same templates."""
