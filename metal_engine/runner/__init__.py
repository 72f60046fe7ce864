"""Executes the scheduler's plans: arrays, forward pass, sampling, drafts and pooling."""
