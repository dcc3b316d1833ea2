"""PURE: the parts of a checkpoint. Keys of objects, boxes, the manifest's objects, the state tree, the plan."""
