"""All ranks say that they make the same call, before one of them waits for another without a deadline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from checkpointd.errors import UsageError
from checkpointd_client.ranks.convening import convene


def agreed(doing: str, said: Mapping[str, object], own: Any, timeout_s: float) -> list[Any]:
    """Let all ranks meet, each with the same `said`; returns the `own` of each rank. DeadlineError names the ranks that do not
    come, and UsageError says which call of another rank is not the same.
    """
    text = json.dumps({"call": doing, **said}, sort_keys=True)
    heard = convene(json.dumps([text, own]), f"calling {doing}", timeout_s)
    texts, owns = zip(*(json.loads(heard[rank]) for rank in sorted(heard)), strict=True)
    other = next((rank for rank, one in enumerate(texts) if one != texts[0]), None)
    if other is not None:
        raise UsageError(
            f"the ranks made different calls: rank 0 said {texts[0]}, and rank {other} {texts[other]}. Nothing was saved "
            "or loaded: let every rank make the same call, with the same directory, at the same step"
        )
    return list(owns)
