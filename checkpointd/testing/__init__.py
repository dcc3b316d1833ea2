"""Test tools that ship with checkpointd: the contract suite for stores, and a simulated clock, disk, bucket and job."""
