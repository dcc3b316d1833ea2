"""EFFECTS: keeps a mirror, a root that gets the checkpoints of another root, whole and in their order."""
