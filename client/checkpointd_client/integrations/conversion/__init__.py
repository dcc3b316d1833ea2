"""Shared by DCP and DeepSpeed: reads pickles without running them, and imports other programs' checkpoints."""
