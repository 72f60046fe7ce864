"""Soak of coding agents: real command lines against the real server, on a model whose text is scripted."""
