"""The Tinker dialect: what the ``tinker`` SDK, its CLI and its cookbook speak, mounted at ``/tinker``."""
