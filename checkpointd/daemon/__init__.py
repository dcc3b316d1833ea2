"""The sidecar: one daemon per node that persists the snapshots of this node's ranks, and outlives them."""
