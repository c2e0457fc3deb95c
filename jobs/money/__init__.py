"""Prices, budgets, receipts, phases, costs and estimates of runs."""
