"""What the layouts do not reach: each function is one case of `device_ranks.py`, run by both its processes."""

CASES = []
