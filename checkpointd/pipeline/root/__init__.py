"""The small objects at a root: the log, starts, leases, plans, `latest`, tag directories."""
