"""Shared by DCP and DeepSpeed: imports other programs' checkpoints."""
