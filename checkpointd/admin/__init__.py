"""Commands that change a root: collection, deletion, recovery. Each reports what it did, or would do."""
