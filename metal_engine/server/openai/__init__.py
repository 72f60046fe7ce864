"""OpenAI's API: completions, chat completions and responses."""
