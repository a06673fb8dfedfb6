"""A load for any OpenAI-compatible server, and what the server made of it."""
