"""The step loop, and the client that prepares requests for it and reads its results."""
