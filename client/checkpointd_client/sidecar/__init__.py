"""The sidecar as a trainer uses it."""
