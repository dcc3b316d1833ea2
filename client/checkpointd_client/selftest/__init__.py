"""Tests checkpointd on the accelerator of this machine, and measures it there."""
