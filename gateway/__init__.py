"""The Loopline gateway: one public port, four dialects, one core."""
