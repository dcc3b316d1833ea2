"""EFFECTS: stores of objects. `base` is the contract; `posix` and `memory` implement it."""

from checkpointd.store.opening import open_store

__all__ = ["open_store"]
