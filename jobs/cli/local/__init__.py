"""`trainyard local`: the embedded AWS of the current folder."""
