"""What runs in Lambda: one file a function, which imports Python's own library and the runtime's boto3 only."""
