"""Text of requests and answers: chat templates, tokenization, detokenization and stop strings."""
