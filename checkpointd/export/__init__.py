"""Exports a checkpoint as plain files for other programs: selects tensors, streams them, and shows the output."""
