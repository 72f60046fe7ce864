"""The server's web page, and its events with the state of the engine."""
