"""Writes one shard: chunks, then the index, then the vote."""
