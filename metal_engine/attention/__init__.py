"""Attention of a packed step over the paged KV cache: choice of the backend, self-tests and tuning."""
