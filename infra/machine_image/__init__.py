"""Build the AMIs of Gaudi instances, from the documents in documents/."""
