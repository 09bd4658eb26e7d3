"""The `loopline` command. One file per noun; ``app`` puts them together."""

from gateway.cli.app import main

__all__ = ["main"]
