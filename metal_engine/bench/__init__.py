"""``metal-engine bench``: measures a server or an engine in this process."""
