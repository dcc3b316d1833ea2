"""What a client asked for, within what this daemon allows: how its saves are persisted and committed."""

from __future__ import annotations

from typing import cast, get_args

from checkpointd.codec import Compression
from checkpointd.config import CommitConfig, PersistConfig, ServeConfig
from checkpointd.daemon import wire
from checkpointd.errors import UsageError


def settings(message: wire.Begin, ours: ServeConfig) -> tuple[PersistConfig, CommitConfig]:
    """UsageError where the client asks for what cannot be."""
    asked = message.budget_bytes
    persist = PersistConfig(
        compression=_compression(message.compression),
        chunk_bytes=message.chunk_bytes,
        budget_bytes=max(asked, 1) if ours.budget_bytes is None else min(asked, ours.budget_bytes),
        encoders=ours.encoders,
        dedup=message.dedup,
    )
    rules = (message.retention or wire.Rules()).checked()
    return persist, CommitConfig(timeout_s=message.commit_timeout_s, retention=rules, on_stale=message.on_stale)


def _compression(name: str) -> Compression:
    for known in get_args(Compression):
        if name == known:
            return cast(Compression, known)
    raise UsageError(f"compression is {name!r}; this daemon knows {', '.join(get_args(Compression))}")
