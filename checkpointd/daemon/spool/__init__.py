"""The spool: a directory on this node's disk in which shards become durable first, and their upload to the root."""
