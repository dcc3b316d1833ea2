"""Other programs' checkpoint formats. The client has a module for each, since reading and writing them needs torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from checkpointd.commands import install
from checkpointd.errors import UsageError

IMPORTS = ("dcp", "deepspeed")
EXPORTS = ("dcp", "deepspeed")
_HOMES = {"dcp": "dcp", "deepspeed": "deepspeed.offline"}


def module_for(name: str, part: str) -> Any:
    """The client's module `part` for the format `name`. UsageError if torch or the client cannot be imported."""
    try:
        return import_module(f"checkpointd_client.integrations.{_HOMES[name]}.{part}")
    except ImportError as error:
        raise UsageError(f"the format {name} needs torch, which cannot be imported ({error}): {install('torch')}") from error
