"""Stands in for Habana's package of that name in a stand-in for Habana's image."""
