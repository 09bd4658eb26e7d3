"""`python -m gateway.cli` is `loopline`."""

from gateway.cli.app import main

main()
