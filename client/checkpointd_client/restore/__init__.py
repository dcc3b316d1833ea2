"""Puts a stored checkpoint back into the user's objects: where to read it, what it contains, where each part goes."""
