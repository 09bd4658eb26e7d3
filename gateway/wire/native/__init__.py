"""The native REST dialect, mounted at ``/training/v1``: the complete surface."""
