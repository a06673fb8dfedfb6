"""Anthropic's Messages API: its requests as chat messages, and the parts of an answer as its content blocks."""
