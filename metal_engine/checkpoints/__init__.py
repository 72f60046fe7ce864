"""Model files: finding, downloading, checking and reading them."""
