"""Sharding: the part of a tensor that this rank holds, its replicas, and the rank that writes it."""
