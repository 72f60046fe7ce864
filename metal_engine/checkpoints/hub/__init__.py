"""Downloads from Hugging Face's hub."""
