"""DeepSpeed engines that save in the background, all ranks or none. `docs/DEEPSPEED.md` shows how."""

from __future__ import annotations

from checkpointd_client.integrations.deepspeed.plug import Plug, attach, install

__all__ = ["Plug", "attach", "install"]
