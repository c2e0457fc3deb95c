"""`trainyard local`: the emulator of the current folder."""
