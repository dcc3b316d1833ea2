"""One rank of a job that reads samples, saves and ends: `python -m tests.integrations.torchdata.reading OPTIONS` (JSON).

It prints the samples of every step, and what the load said, as JSON.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from checkpointd.errors import CheckpointdError
from checkpointd_client import Checkpointer
from checkpointd_client.integrations.torchdata import ReshardingLoader, ReshardingSampler

SAMPLES = 50


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The samples of one rank, with a position of its own."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._left = list(range(SAMPLES))[rank::ranks]
        self._next = 0

    def __iter__(self) -> Iterator[int]:
        while self._next < len(self._left):
            self._next += 1
            yield self._left[self._next - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


def loader_of(kind: str, rank: int, ranks: int, **options: Any) -> Any:
    if kind == "stream":
        return StatefulDataLoader(Stream(rank, ranks), **options)
    if kind == "stateful":
        return StatefulDataLoader(Numbers(), sampler=StatefulDistributedSampler(Numbers(), ranks, rank, seed=3), **options)
    return ReshardingLoader(StatefulDataLoader(Numbers(), sampler=ReshardingSampler(Numbers(), seed=3), **options))


def main(root: str, kind: str, rank: int, ranks: int, workers: int, batch_size: int, steps: int | None, meeting: str) -> None:
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    loader = loader_of(kind, rank, ranks, num_workers=workers, batch_size=batch_size)
    said: dict[str, Any] = {"steps": [], "error": "", "left": []}
    state = {"step": torch.zeros(1), "loader": loader}
    with Checkpointer(root, read_back=False) as ckpt:
        try:
            loaded = ckpt.load(state)
            said["left"] = list(loaded.per_rank_left) if loaded else []
        except CheckpointdError as error:
            said["error"] = f"{type(error).__name__}: {error}"
        else:
            number = loaded.step if loaded else 0
            for batch in loader:
                said["steps"].append(batch.tolist())
                if len(said["steps"]) == steps:
                    break
            ckpt.save(number + 1, state).wait()
    print(json.dumps(said))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
