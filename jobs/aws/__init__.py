"""boto3, as the command line and the container share it: the connection, how its errors read, and files on S3."""
