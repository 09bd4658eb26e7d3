"""The OpenAI dialect, mounted at ``/v1``: models, completions, chat completions."""
