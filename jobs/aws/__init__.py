"""The use of boto3 that the command line and the container share: the connection, readable errors, files on S3."""
