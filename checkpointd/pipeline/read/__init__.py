"""Reads checkpoints: chooses a checkpoint, reads its indexes, reads and checks its chunks, and reads any box of any tensor."""
