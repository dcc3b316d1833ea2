"""The small objects at a root: attempts, starts, leases, marks, `latest`, tag directories."""
