"""Attaches checkpointd to DeepSpeed engines: to one, or to all that are made from now on."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

from checkpointd import arguments
from checkpointd.errors import UsageError
from checkpointd_client.capture.scalars import type_name
from checkpointd_client.integrations.deepspeed.adapter_base import Adapter
from checkpointd_client.integrations.deepspeed.checkpoint_engine import CheckpointdEngine
from checkpointd_client.integrations.deepspeed.files_adapter import FilesAdapter
from checkpointd_client.integrations.deepspeed.tensor_adapter import TensorAdapter
from checkpointd_client.integrations.deepspeed.watching import check_layout, teach, watch
from checkpointd_client.settings import Options

Layout = Literal["deepspeed", "checkpointd"]


def attach(
    engine: Any,
    root: str | os.PathLike[str] | None = None,
    *,
    sidecar: str | os.PathLike[str] | None = None,
    layout: Layout | None = None,
    synchronous: bool | None = None,
    **options: Any,
) -> Adapter:
    """Let `engine.save_checkpoint` and `engine.load_checkpoint` go through checkpointd from here on. Call it on every rank.

    `root`: a directory at or above every `save_dir` that will be used. By default each save_dir is a root of its own; for one
    that is called `checkpoint-N`, the root is the directory above it. `options` are those of Checkpointer. Settings that are
    not given here are read from the DeepSpeed settings, under `checkpoint.checkpointd`. `synchronous`: save_checkpoint returns
    once the save has committed, and raises its error if it failed; for scripts that read the files right after it.

    UsageError for invalid settings, and for an engine that is attached already.
    """
    if not (hasattr(engine, "save_checkpoint") and hasattr(engine, "checkpoint_engine")):
        raise UsageError(
            f"attach() takes the engine that deepspeed.initialize() returns first, and got a {type_name(engine)}: "
            "engine, *_ = deepspeed.initialize(...); attach(engine)"
        )
    if isinstance(engine.checkpoint_engine, CheckpointdEngine):
        raise UsageError("this engine is attached to checkpointd already: attach it once")
    settings = dict(_settings_of(engine))
    given = {"root": root, "sidecar": sidecar, "layout": layout, "synchronous": synchronous, **options}
    settings.update({name: value for name, value in given.items() if value is not None})
    _check(settings)
    chosen = settings.pop("layout", "deepspeed")
    if engine.zero_nvme_offload_optimizer():
        raise UsageError(
            "DeepSpeed copies NVMe-offloaded optimizer states by itself: checkpointd cannot commit them; turn it off"
        )
    plug = (FilesAdapter if chosen == "deepspeed" else TensorAdapter)(engine, settings)
    plug.connect()
    return plug


def _check(settings: Mapping[str, Any]) -> None:
    """UsageError for a setting that does not exist, or has a bad value."""
    Options.of({name: value for name, value in settings.items() if value is not None}, beside=_OWN)
    if settings.get("layout") is not None:
        arguments.choice("layout", settings["layout"], get_args(Layout))


_OWN = ("root", "sidecar", "layout", "synchronous")


def _settings_of(engine: Any) -> Mapping[str, Any]:
    found = (getattr(engine, "config", None) or {}).get("checkpoint", {}).get("checkpointd", {})
    if not isinstance(found, dict):
        raise UsageError(f"checkpoint.checkpointd in the DeepSpeed settings is {found!r}; it must be an object of settings")
    return found


def install(**options: Any) -> None:
    """Attach every engine that deepspeed.initialize makes from here on: for scripts in which a library calls it.

    `options` are those of `attach`. Also changes Hugging Face's Trainer and Accelerate, so that they do not treat a save as a
    checkpoint before it commits. UsageError for layout "checkpointd", whose checkpoints they would not find.
    """
    import deepspeed

    _check(options)
    check_layout(options.get("layout"))
    teach()
    original = deepspeed.initialize
    if hasattr(original, "checkpointd"):
        return

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        check_layout(options.get("layout") or _settings_of(made[0]).get("layout"))
        plug = attach(made[0], **options)
        teach()  # the libraries may have been imported meanwhile
        watch(made[0], plug)
        return made

    initialize.checkpointd = attach  # type: ignore[attr-defined]  # marks the wrapper, for a second call
    deepspeed.initialize = initialize
