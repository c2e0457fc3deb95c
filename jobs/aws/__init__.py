"""boto3 for the command line and the container: the connection, readable errors, files on S3."""
