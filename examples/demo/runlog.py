"""What a run leaves beside its checkpoints: every loss, the timings of every save, and digests of the final state."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from checkpointd.store.requests import Requests
from checkpointd_client import SaveHandle
from parallel import whole


class RunLog:
    """The log of one rank, three files in `folder`: `losses-<rank>.jsonl`, `saves-<rank>.jsonl`, `final-<rank>.json`.

    A resumed run trains the steps after its checkpoint again, so their losses are dropped first: line n of the
    losses is always step n, once. `requests` gives those that this rank has sent to a bucket so far.
    """

    def __init__(self, folder: Path, *, rank: int, start: int, requests: Callable[[], Requests | None] = lambda: None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rank = folder, rank
        self._losses = _keep_lines(folder / f"losses-{rank}.jsonl", start)
        self._saves = (folder / f"saves-{rank}.jsonl").open("a", encoding="utf-8")
        self._pending: list[tuple[int, SaveHandle]] = []
        self._last: float | None = None
        self._requests, self._counted = requests, requests()

    def step(self, step: int, loss: float) -> None:
        """Write the loss exactly (`float.hex`), the seconds since the step before, and the saves that have ended meanwhile.

        The seconds of step n+1 include a `save()` that was called after step n. A process's first step has none.
        """
        now = time.perf_counter()
        _write(self._losses, {"step": step, "loss": loss.hex(), "step_s": None if self._last is None else now - self._last})
        self._last = now
        self._finished_saves()

    def saving(self, step: int, handle: SaveHandle) -> None:
        self._pending.append((step, handle))

    def finish(self, state: Mapping[str, object]) -> None:
        """Call after `ckpt.close()`: the last saves' timings, and a digest of every tensor in `state`."""
        self._finished_saves()
        digests = dict(tensor_digests(state))
        (self.folder / f"final-{self.rank}.json").write_text(json.dumps(digests, indent=1), encoding="utf-8")
        self._losses.close()
        self._saves.close()

    def _finished_saves(self) -> None:
        for step, handle in [pending for pending in self._pending if pending[1].done()]:
            self._pending.remove((step, handle))
            _write(self._saves, {**_save_entry(step, handle), "requests": self._since_the_last()})

    def _since_the_last(self) -> dict[str, int] | None:
        """The requests of this rank since the save before had ended; None where the root is not in a bucket."""
        before, self._counted = self._counted, self._requests()
        return None if before is None or self._counted is None else (self._counted - before).by_kind()


def _save_entry(step: int, handle: SaveHandle) -> dict[str, object]:
    timings = handle.timings
    return {
        "step": step,
        "tag": handle.tag,
        "phase": str(handle.phase),
        "attempt": handle.attempt,
        "call_s": timings.call_s,
        "fence_s": timings.fence_s,
        "safe_s": timings.safe_s,
        "durable_s": timings.durable_s,
        "committed_s": timings.committed_s,
    }


def _keep_lines(path: Path, count: int) -> TextIO:
    lines = path.read_text(encoding="utf-8").splitlines()[:count] if path.exists() else []
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path.open("a", encoding="utf-8")


def _write(file: TextIO, entry: Mapping[str, object]) -> None:
    file.write(json.dumps(entry) + "\n")
    file.flush()  # the process may be killed at any moment


def tensor_digests(state: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Walk modules, optimizers and state_dicts; yield every leaf's name and the digest of its exact bits.

    Of a sharded tensor it is the digest of the whole, so all ranks must walk together.
    """
    tree = state.state_dict() if hasattr(state, "state_dict") else state
    if isinstance(tree, Tensor):
        raw = whole(tree.detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        yield name, f"{tree.dtype} {list(tree.shape)} {hashlib.sha256(raw).hexdigest()}"
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from tensor_digests(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        for index, value in enumerate(tree):
            yield from tensor_digests(value, f"{name}.{index}")
    else:
        yield name, repr(tree)
