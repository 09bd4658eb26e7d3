"""Crash tests: a seeded driver, faults, and oracles that share no code with what they judge.

``plan`` and ``history`` are pure; ``driver``, ``faults``, ``proxy`` and ``processes`` do the I/O; ``oracles`` judge.
``python -m tests.crash --help`` lists the suites, docs/reliability.md says what each one shows.
"""
