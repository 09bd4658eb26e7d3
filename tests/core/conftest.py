"""Property tests of the core: no deadline per example, since the machine may be busy."""

from hypothesis import settings

settings.register_profile("loopline", deadline=None)
settings.load_profile("loopline")
