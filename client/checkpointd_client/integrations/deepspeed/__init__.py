"""DeepSpeed engines that save in the background, all ranks or none. `docs/DEEPSPEED.md` shows how.

Functions that only read checkpoints work without DeepSpeed: each module is imported when one of its names is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpointd_client.lazy_names import names_of

if TYPE_CHECKING:
    from checkpointd_client.integrations.deepspeed.adapter_base import Adapter
    from checkpointd_client.integrations.deepspeed.attaching import attach, install
    from checkpointd_client.integrations.deepspeed.calls import load_checkpoint, save_checkpoint
    from checkpointd_client.integrations.deepspeed.offline.fp32 import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )

__all__ = [
    "Adapter",
    "attach",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "install",
    "load_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "save_checkpoint",
]

if not TYPE_CHECKING:
    __getattr__ = names_of(
        __name__,
        {
            **dict.fromkeys(__all__, "offline.fp32"),
            "Adapter": "adapter_base",
            **dict.fromkeys(("attach", "install"), "attaching"),
            **dict.fromkeys(("load_checkpoint", "save_checkpoint"), "calls"),
        },
    )
