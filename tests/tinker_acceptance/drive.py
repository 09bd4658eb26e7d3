"""``python -m tests.tinker_acceptance.drive MODULE OPTION=VALUE ...``: the command line that a trainer lacks.

Some of the cookbook's trainers are a ``Config`` and a ``main``, to be called from Python. The options are the fields of
the ``Config``, spelled as in the cookbook's own programs.
"""

import asyncio
import importlib
import inspect
import sys

import chz


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    config = chz.Blueprint(module.Config).make_from_argv(sys.argv[2:])
    ended = module.main(config)
    if inspect.iscoroutine(ended):
        asyncio.run(ended)


if __name__ == "__main__":
    main()
