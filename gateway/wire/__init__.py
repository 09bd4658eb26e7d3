"""The dialects: each parses, translates, calls the core and renders. No state, no rules, no SQL."""
