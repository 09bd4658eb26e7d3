"""The product in plain Python: sessions, operations, versions, sampling. Standard library only."""
