"""Prices, budgets, phases, costs and estimates of runs."""
