"""A load for any OpenAI-compatible server, and the server's performance under it."""
