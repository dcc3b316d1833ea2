"""Reads checkpoints: choose one, read its indexes, read and check its chunks, read any box of any tensor."""
