"""The snapshots that a daemon holds in memory: slots, their layouts, and the tier for trainers that start again."""
