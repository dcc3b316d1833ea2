"""The user's state as named tensors and a tree of everything else."""
