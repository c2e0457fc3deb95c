"""Lambda functions, one file each. They only import the standard library, boto3, and each other."""
