"""The daemon's work for its roots between saves: scan them, and decide attempts in doubt."""
