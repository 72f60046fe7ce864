"""Trained draft heads of checkpoints: where they are, their tensors and their quantization."""
