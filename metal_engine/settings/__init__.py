"""Arguments of users, and the configuration that follows from them."""
