"""The tiers that a daemon keeps beside its roots: mirrors, exports, and the spool of its node."""
