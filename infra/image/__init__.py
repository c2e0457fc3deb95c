"""The stack that holds the images which jobs run in, and builds them in CodeBuild."""
