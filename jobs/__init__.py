"""What researchers use: specs, plans, the command line, and the code that runs inside the container."""
