"""Work with runs: submit, follow, read, resume and explain them, and run sweeps."""
