"""A simulated training job: its ranks, sidecars, readers and collectors, its faults, and the invariants that it keeps."""
