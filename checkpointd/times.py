"""Times in words. Nothing here has effects."""

from __future__ import annotations

from datetime import UTC, datetime


def utc(seconds: float) -> str:
    """A time in seconds since 1970 as every part of checkpointd shows it: `2026-11-28T09:30:11Z`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
