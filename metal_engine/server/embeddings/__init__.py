"""Endpoints for embeddings, scores and reranking."""
