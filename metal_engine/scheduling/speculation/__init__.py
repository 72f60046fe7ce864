"""Checks whether drafts pay, and plans their number for each request."""
