"""Schemas, regexes and grammars of requests, tried out in a child process before an engine sees them."""
