"""fabric-check: whether the ranks of a job reach each other, right and fast."""
