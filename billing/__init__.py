"""Prices and money. Stands alone: imports nothing of the gateway or the trainer."""
