"""The roots of checkpoints that are shown as directories, for libraries whose calls name such a directory."""
