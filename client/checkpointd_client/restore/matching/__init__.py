"""Matches stored tensors with the user's objects."""
