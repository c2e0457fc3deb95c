"""Hold the images that jobs run in, and build them in CodeBuild."""
