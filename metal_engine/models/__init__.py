"""Models of mlx-lm, changed to run packed steps on the paged KV cache."""
