"""What a model's text means: reasoning, content and tool calls, from the format of the model's answers."""
