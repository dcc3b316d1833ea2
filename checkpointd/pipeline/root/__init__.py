"""The objects at a root beside the tensors' bytes: attempts, epochs, leases, marks, `latest`, tag directories."""
