"""Models and tokenizers from GGUF files."""
