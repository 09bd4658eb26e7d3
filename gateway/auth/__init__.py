"""Who is calling: API keys and the master key they derive from."""
