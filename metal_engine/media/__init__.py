"""Images of requests: reads the files, decodes them, and inserts the images' tokens into the prompt."""
