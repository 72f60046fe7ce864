"""Several ranks that compute one model together."""
