"""What one does with runs: submit, follow, read, resume, explain, sweep."""
