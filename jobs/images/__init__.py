"""Container images: what is in them, and how they are built."""
