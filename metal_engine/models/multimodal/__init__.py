"""Image encoders, and merging of their features into the embeddings of prompts."""
