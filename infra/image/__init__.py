"""The stack that holds the images of jobs and builds them in CodeBuild."""
