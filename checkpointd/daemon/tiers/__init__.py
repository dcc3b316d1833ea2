"""The tiers that a daemon keeps beside its roots: mirrors, and the spool of its node."""
