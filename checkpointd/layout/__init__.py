"""PURE: the parts of a checkpoint: keys of objects, boxes, the manifest's objects, the state tree, the plan."""
