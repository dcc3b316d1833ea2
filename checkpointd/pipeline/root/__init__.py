"""The small objects at a root: the log, starts, leases, indexes, `latest`, tag directories."""
