"""The random number generators of this process as one object of the state."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

log = logging.getLogger("checkpointd")


class RngState:
    """The global generators of Python, numpy and torch (host, and every visible accelerator). Put it into the state.

    This is per-rank state: every rank saves and loads its own. A load restores it last, so that loading other objects does not
    draw from it. Generators of accelerators are saved only if this process already uses one. A device that is missing at the
    load is skipped with a warning; a device that was not saved keeps its generator.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state of every generator. This draws from none of them."""
        version, numbers, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return {
            "python": {"version": version, "numbers": np.array(numbers, dtype=np.uint32), "gauss": gauss},
            "numpy": {
                "name": name,
                "keys": keys,
                "position": position,
                "has_gauss": has_gauss,
                "cached_gaussian": cached,
            },
            "torch": torch.get_rng_state(),
            "accelerators": _accelerators(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set every generator to its state in `state_dict`; KeyError if one is missing there."""
        python, numpy = state_dict["python"], state_dict["numpy"]
        random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
        np.random.set_state((numpy["name"], numpy["keys"], numpy["position"], numpy["has_gauss"], numpy["cached_gaussian"]))
        torch.set_rng_state(state_dict["torch"].cpu())
        for kind, states in state_dict["accelerators"].items():
            _set_accelerators(kind, states)


def _accelerators() -> dict[str, list[torch.Tensor]]:
    """The state of each device's generator, by the kind of device; empty while this process uses none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return {}
    backend = torch.get_device_module(accelerator.type)
    if not hasattr(backend, "get_rng_state") or not getattr(backend, "is_initialized", lambda: False)():
        return {}
    return {accelerator.type: [backend.get_rng_state(index) for index in range(torch.accelerator.device_count())]}


def _set_accelerators(kind: str, states: list[torch.Tensor]) -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    present = torch.accelerator.device_count() if accelerator is not None and accelerator.type == kind else 0
    for index, state in enumerate(states[:present]):
        torch.get_device_module(kind).set_rng_state(state.cpu(), index)
    if present < len(states):
        log.warning(
            "the random number generators of %d %s devices were saved and %d devices are here. The generators of the "
            "missing devices were not restored, so random numbers drawn on a device may differ from those of the saved run",
            len(states),
            kind,
            present,
        )
