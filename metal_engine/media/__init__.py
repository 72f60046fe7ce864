"""Images of requests, from their source to placeholders in the prompt."""
