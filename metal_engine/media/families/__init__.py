"""Image processing of the supported model families, one class for each."""
