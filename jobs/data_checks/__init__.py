"""Check tables and models, on the laptop and in the container, before a job costs anything."""
