from tests.engines.fixtures import scripted_engine

__all__ = ["scripted_engine"]
