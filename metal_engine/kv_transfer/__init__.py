"""KV of finished blocks in stores, for other requests and other servers."""
