"""Code shared by all endpoints that generate, from the parameters of a request to streams of its outputs."""
