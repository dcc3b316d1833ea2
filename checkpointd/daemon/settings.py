"""The settings for the saves of one start: those that the client asked for, within the daemon's limits."""

from __future__ import annotations

from typing import cast, get_args

from checkpointd.codec import Compression
from checkpointd.config import CommitConfig, PersistConfig, ServeConfig
from checkpointd.daemon.protocol import wire
from checkpointd.errors import UsageError


def persist_config(asked: wire.Begin, ours: ServeConfig) -> PersistConfig:
    """UsageError for invalid settings."""
    bounded = ours.budget_bytes is not None
    return PersistConfig(
        compression=_compression(asked.compression),
        chunk_bytes=asked.chunk_bytes,
        budget_bytes=min(asked.budget_bytes, ours.budget_bytes or 0) if bounded else max(asked.budget_bytes, 1),
        encoders=ours.encoders,
        dedup=asked.dedup,
        full_every=asked.full_every,
    )


def commit_config(asked: wire.Begin) -> CommitConfig:
    """UsageError for invalid settings."""
    rules = (asked.retention or wire.Rules()).checked()
    return CommitConfig(
        timeout_s=asked.commit_timeout_s, retention=rules, on_no_progress=asked.on_no_progress, read_back=asked.read_back
    )


def _compression(name: str) -> Compression:
    if name not in get_args(Compression):
        raise UsageError(f"compression is {name!r}; this daemon knows {', '.join(get_args(Compression))}")
    return cast(Compression, name)
