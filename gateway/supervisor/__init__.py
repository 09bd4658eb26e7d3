"""`loopline up`: one command that runs gateway, trainers and engines on one machine.

``plan`` decides what to run, ``supervisor`` keeps it running, ``groups`` and ``records`` make sure that nothing is
left behind, ``up`` ties them together and talks to the person at the terminal.
"""
