"""A checkpoint as plain files for other programs: which tensors, read how, written where."""
