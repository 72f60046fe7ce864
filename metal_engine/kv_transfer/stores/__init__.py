"""Kinds of KV stores."""
