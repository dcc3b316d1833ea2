"""The daemon's state as plain data, and conclusions from it: pure."""
