"""PURE: what a checkpoint is. Keys of objects, boxes, the manifest's objects, the state tree, the plan."""
