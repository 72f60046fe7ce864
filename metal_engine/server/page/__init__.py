"""The server's web page, and the events that show what the engine does."""
