"""What DCP and DeepSpeed share: pickles read without running them, and other programs' checkpoints as ours."""
