"""What runs in Lambda: a file a function, which imports Python's own library, boto3, and modules of this folder."""
