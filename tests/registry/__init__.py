"""What the registry promises, on real parts: adapters under load, round trips, many publications.

``python -m tests.registry`` measures the whole amounts and prints tables; the tests here are slices of the same.
"""
