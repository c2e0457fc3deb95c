"""Check tables and models before anything is paid for, on the laptop and in the container."""
