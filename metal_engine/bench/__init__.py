"""``metal-engine bench``: measures a server, or an engine that the command runs in its own process."""
