"""Chat dialects: messages to a prompt, and the text of an answer to reasoning, content and tool calls."""
