"""The random number generators of this process as one object of the state."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

log = logging.getLogger("checkpointd")


class RngState:
    """The global generators of Python, numpy and torch (host, and every visible CUDA device), to be put into the state.

    A per-rank value: every rank saves and loads its own. It is restored after everything else, so that no other object's
    loading draws from it. CUDA generators are saved once CUDA is in use in this process: asking before would start it. A device
    that is missing on loading is skipped with a warning, and one that was not saved keeps its generator as it is.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state of every generator; no generator moves on."""
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
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set every generator to what `state_dict` says; KeyError where one is missing from it."""
        python, numpy = state_dict["python"], state_dict["numpy"]
        random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
        np.random.set_state((numpy["name"], numpy["keys"], numpy["position"], numpy["has_gauss"], numpy["cached_gaussian"]))
        torch.set_rng_state(state_dict["torch"].cpu())
        _set_cuda(state_dict["cuda"])


def _set_cuda(states: list[torch.Tensor]) -> None:
    present = torch.cuda.device_count() if states else 0
    for device, state in enumerate(states[:present]):
        torch.cuda.set_rng_state(state.cpu(), device)
    if present < len(states):
        log.warning(
            "the random number generators of %d CUDA devices were saved and %d devices are here: "
            "those of the others were not restored, so random numbers drawn on a device may differ from the saved run's",
            len(states),
            present,
        )
