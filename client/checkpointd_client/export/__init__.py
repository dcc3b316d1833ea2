"""A checkpoint as files for other programs, and as tensors by name."""
