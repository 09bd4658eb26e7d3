"""tinker-cookbook, unmodified and offline, learns through Loopline: ``python -m tests.tinker_acceptance``.

One module per recipe: it starts the cookbook's own program in a process of its own, waits for exit status 0, and
reads the metric that shows that something was learned from the program's own log.
"""
