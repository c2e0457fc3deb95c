"""A stand-in for Habana's package of this name."""
