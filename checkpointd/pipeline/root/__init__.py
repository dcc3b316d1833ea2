"""The small objects at a root: attempts, epochs, leases, marks, `latest`, tag directories."""
