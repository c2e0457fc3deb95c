"""From inputs to batches: sources, documents, corpora, labelled text, packed tokens."""
