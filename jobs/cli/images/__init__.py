"""The commands `trainyard images`, a file each."""
