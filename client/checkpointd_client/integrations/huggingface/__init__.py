"""Hugging Face's Trainer and Accelerate save in the background, all ranks or none. `docs/howto/HUGGINGFACE.md` shows how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpointd_client.lazy_names import names_of

if TYPE_CHECKING:
    from checkpointd_client.integrations.huggingface.installing import install

__all__ = ["install"]

if not TYPE_CHECKING:
    __getattr__ = names_of(__name__, {"install": "installing"})
