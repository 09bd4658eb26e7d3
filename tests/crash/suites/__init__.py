"""The suites: each draws plans, runs episodes and returns a verdict."""
