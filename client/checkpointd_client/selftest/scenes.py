"""Scenes in which a missing wait would show, and how checkpointd itself plays them.

A scene changes a module right before and right after its snapshot, as training does, while some of the queued work runs late.
The snapshot must be of the moment of the call.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from checkpointd.errors import CheckpointdError
from checkpointd_client import Checkpointer, devices

Values = tuple[torch.Tensor, torch.Tensor]


class Net(torch.nn.Module):
    """`weight` changes in `optimizer.step()`, `seen` in the forward pass."""

    seen: torch.Tensor

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__()
        count = max(nbytes // 4, 1)
        self.weight = torch.nn.Parameter(torch.ones(count, device=device))
        self.register_buffer("seen", torch.ones(count, device=device))


class Taker(Protocol):
    """Takes a snapshot of a Net."""

    def take(self) -> None:
        """Begin the snapshot; it is of this moment."""
        ...

    def before_step(self) -> None:
        """Make the current stream wait until `weight` may change."""
        ...

    def taken(self) -> Values:
        """`weight` and `seen` as the snapshot has them, in host memory. Waits until it is whole."""
        ...


class Training:
    """A Net and its optimizer on `device`, in two tensors of `nbytes` each."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device, self.nbytes = device, nbytes
        self.net = Net(nbytes, device)
        self.optimizer = torch.optim.SGD([self.net.weight], lr=1.0)
        self.net.weight.grad = torch.ones_like(self.net.weight)

    @property
    def state(self) -> dict[str, Any]:
        """For `Checkpointer.save` and `load`."""
        return {"net": self.net, "optimizer": self.optimizer}

    def snapshot(self, taker: Taker, late: AbstractContextManager[float]) -> str:
        """Take a snapshot while some work is late. Returns what is wrong with it, or "" if it is of the moment of the call."""
        net = self.net
        with torch.no_grad():
            net.weight.fill_(1)
            net.seen.fill_(1)
            torch.full_like(net.seen, 7.0)  # freed at once: a clone that is made too late shows these bytes
        torch.accelerator.synchronize(self.device)
        with late, torch.no_grad():
            net.weight.mul_(5)
            net.seen.mul_(5)
            taker.take()
            net.seen.mul_(3)  # as in the next forward pass, which also allocates
            others = [torch.full_like(net.seen, 9.0) for _ in range(3)]
            taker.before_step()
            self.optimizer.step()
            try:
                weight, seen = taker.taken()
            except CheckpointdError as error:
                return f"the save failed: {error}"
            finally:
                del others
        return _wrong("weight", weight, 5) or _wrong("seen", seen, 5)


class Product:
    """checkpointd as the taker: it saves below `root`, and loads what it saved into host memory."""

    def __init__(self, root: str | os.PathLike[str], training: Training) -> None:
        self.training = training
        self.checkpointer = Checkpointer(root, compression="none", retention=1, read_back=False, on_no_progress="ignore")
        self._step = 0
        self.take()  # the first save makes the arena
        self._handle.wait()

    def take(self) -> None:
        """Save."""
        self._step += 1
        self._handle = self.checkpointer.save(self._step, self.training.state)

    def before_step(self) -> None:
        """Nothing: the optimizer's step calls checkpointd by itself."""

    def taken(self) -> Values:
        """The checkpoint."""
        self._handle.wait()
        found = Training(self.training.nbytes, torch.device("cpu"))
        self.checkpointer.load(found.state, tag=self._handle.tag)
        return found.net.weight.detach(), found.net.seen

    def close(self) -> None:
        """End it. Failed saves were reported already."""
        self.checkpointer.__exit__(RuntimeError, None, None)


class Loading:
    """Tensors to load, `nbytes` each: contiguous, strided, and of another dtype than they are stored in."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device
        side = max(int((nbytes // 4) ** 0.5), 1)
        self.stored = {name: torch.full((side, side), 3.0, device=device) for name in ("contiguous", "strided", "converted")}
        made = {name: torch.zeros_like(tensor) for name, tensor in self.stored.items()}
        self.targets = {**made, "strided": made["strided"].t(), "converted": made["converted"].double()}

    def save(self, checkpointer: Checkpointer) -> None:
        """Save each tensor as a checkpoint of its own: what is converted is loaded in another way than the others."""
        for step, (name, tensor) in enumerate(self.stored.items()):
            checkpointer.save(step, {name: tensor}).wait()

    def load(self, checkpointer: Checkpointer) -> None:
        """Load all of them."""
        for step, (name, target) in enumerate(self.targets.items()):
            checkpointer.load({name: target}, tag=f"global_step{step}", cast=name == "converted")

    def loaded(self, load: Callable[[], object], late: AbstractContextManager[float]) -> str:
        """Call `load` between other work on the targets, some of which is late. Returns what is wrong with them, or "".

        The caller's stream is not the default one, since a load must follow that stream.
        """
        stream = torch.Stream(self.device)
        torch.accelerator.synchronize(self.device)
        with devices.on_stream(stream):
            with late:
                for tensor in self.targets.values():
                    tensor.fill_(0.5)
                load()
                read = {name: tensor * 1 for name, tensor in self.targets.items()}
            torch.accelerator.synchronize(self.device)
            found = [_wrong(name, tensor.cpu(), 3) for name, tensor in self.targets.items()]
            found += [_wrong(f"what was read of {name} after the load", tensor.cpu(), 3) for name, tensor in read.items()]
        return next(filter(None, found), "")


def _wrong(name: str, found: torch.Tensor, value: float) -> str:
    count = int((found != value).sum())
    return f"{name} has {count} of {found.numel()} elements of another moment" if count else ""
