"""checkpointd: asynchronous, all-or-nothing checkpoints. This package is the service and never imports torch."""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__"]
