"""Hugging Face's Trainer and Accelerate save in the background, all ranks or none. `docs/howto/HUGGINGFACE.md` shows how."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpointd_client.integrations.huggingface.installing import install

__all__ = ["install"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.installing"), name)
