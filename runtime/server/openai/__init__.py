"""The shapes of OpenAI's API: what requests hold and how answers are written."""
