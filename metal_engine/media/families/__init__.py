"""Image processors of the supported model families."""
