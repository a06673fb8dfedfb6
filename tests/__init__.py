"""Tests mirror the folders; what they share is imported as ``tests.…``, from the root of the repository."""
