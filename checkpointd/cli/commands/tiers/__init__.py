"""Commands for roots on several tiers of storage."""
