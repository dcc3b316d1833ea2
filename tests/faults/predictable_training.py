"""A training job whose whole state follows from (seed, rank, step), so that every bit of a checkpoint can be checked.

Nothing is learned: the optimizer's step writes what belongs to the step into parameters and moments. So a byte of another step,
of another rank or of nowhere shows, wherever it lies.

Run as a script it trains until it is stopped, and notes what it sees as JSON lines in a file that outlives it.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from checkpointd.errors import CheckpointdError
from checkpointd_client import Checkpointer, SaveHandle
from checkpointd_client.sidecar import link

KIB = 1024
PARAMETERS = ("weights", "noise")
SLOW_CHANGE = 4
"""Steps for which the buffer stays as it is."""


def leaf(seed: int, rank: int, step: int, name: str, nbytes: int) -> NDArray[np.float32]:
    """What belongs into the leaf `name` after `step`: normal values for weights, else any bit pattern that a float can have."""
    random = np.random.Generator(np.random.SFC64([seed, rank, step, *name.encode()]))
    if name.startswith("weights"):
        return random.standard_normal(nbytes // 4, dtype=np.float32)
    return np.frombuffer(random.bytes(nbytes // 4 * 4), dtype=np.float32)


def expected(seed: int, rank: int, step: int, nbytes: int) -> dict[str, bytes]:
    """Every stored tensor of a rank's checkpoint of `step`, by FQN, as raw bytes. `nbytes` as given to Training."""
    part = nbytes // 4
    found = {"model.slow": leaf(seed, rank, step // SLOW_CHANGE, "slow", 4 * KIB)}
    for name in PARAMETERS:
        found[f"model.{name}"] = leaf(seed, rank, step, name, part)
        found[f"optimizer.state.model.{name}.moment"] = leaf(seed, rank, step, f"{name} moment", part)
        found[f"optimizer.state.model.{name}.step"] = np.array(step, dtype=np.float32)
    return {fqn: value.tobytes() for fqn, value in found.items()}


class StepSetOptimizer(torch.optim.Optimizer):
    """An optimizer that sets parameters and moments to what belongs to the step that it is turned to."""

    # The same without their wrapper, which imports torch's compiler at the first call: a second of every rank's start.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], belongs: Callable[[int, str, int], torch.Tensor]) -> None:
        self._names = dict(named)
        super().__init__(list(self._names.values()), {})
        self._belongs = belongs
        self.to = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # nothing is differentiated here
        for name, parameter in self._names.items():
            state = self.state[parameter]
            if not state:
                state["moment"], state["step"] = torch.empty_like(parameter), torch.zeros(())
            parameter.copy_(self._belongs(self.to, name, parameter.nbytes))
            state["moment"].copy_(self._belongs(self.to, f"{name} moment", parameter.nbytes))
            state["step"].fill_(self.to)


class Position:
    """A data loader's position: plain values of the rank."""

    def __init__(self, seed: int, rank: int) -> None:
        self._of = {"seed": seed, "rank": rank}
        self.now: dict[str, object] = {}
        self.turn_to(0)

    def turn_to(self, step: int) -> None:
        self.now = self.at(step)

    def at(self, step: int) -> dict[str, object]:
        return {**self._of, "step": step, "shuffled": [step * 7 % 5, None, f"file {step}", bytes([step % 256])]}

    def state_dict(self) -> dict[str, object]:
        return self.now

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.now = state


class Training:
    """One rank's model, optimizer and position; about `nbytes` in tensors."""

    def __init__(self, *, seed: int, rank: int, nbytes: int) -> None:
        self.seed, self.rank, self.nbytes = seed, rank, nbytes
        self.model = nn.Module()
        for name in PARAMETERS:
            self.model.register_parameter(name, nn.Parameter(torch.zeros(nbytes // 4 // 4)))
        self.model.register_buffer("slow", torch.zeros(KIB))
        self.optimizer = StepSetOptimizer(self.model.named_parameters(), self._belongs)
        self.position = Position(seed, rank)
        self.step = -1

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "position": self.position}

    @property
    def client_state(self) -> dict[str, object]:
        return {"seed": self.seed, "step": self.step}

    def advance(self, step: int) -> None:
        """Train `step`: afterwards the state is what belongs to it."""
        self.optimizer.to = step
        self.optimizer.step()
        self.position.turn_to(step)
        slow = self.model.get_buffer("slow")
        slow.copy_(self._belongs(step // SLOW_CHANGE, "slow", slow.nbytes))
        self.step = step

    def wrong(self, step: int) -> list[str]:
        """The leaves that are not, bit for bit, what belongs to `step`."""
        right = expected(self.seed, self.rank, step, self.nbytes)
        found = [fqn for fqn, tensor in self._tensors() if tensor.numpy().tobytes() != right.pop(fqn, b"")]
        return found + sorted(right) + [f"position.{k}" for k, v in self.position.at(step).items() if self.position.now[k] != v]

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((f"model.{name}", tensor.detach()) for name, tensor in self.model.state_dict().items())
        for number, state in self.optimizer.state_dict()["state"].items():
            of = f"optimizer.state.model.{PARAMETERS[number]}"
            yield from ((f"{of}.{name}", tensor) for name, tensor in state.items())

    def _belongs(self, step: int, name: str, nbytes: int) -> torch.Tensor:
        return torch.from_numpy(leaf(self.seed, self.rank, step, name, nbytes).copy())


# --- a job that trains until it is stopped ---


class Journal:
    """What a rank saw, one JSON line each, in a file that is there whatever becomes of the process."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, event: str, **facts: object) -> None:
        os.write(self._descriptor, json.dumps({"event": event, "pid": os.getpid(), **facts}).encode() + b"\n")


class Watch:
    """Notes how every save ends, as soon as its handle says so. With a spool, newer saves may end first."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._ended: queue.SimpleQueue[SaveHandle] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, handle: SaveHandle) -> None:
        handle.when_done(partial(self._ended.put, handle))

    def _run(self) -> None:
        while True:
            handle = self._ended.get()
            try:
                handle.wait()
                self._journal.note("committed", tag=handle.tag, attempt=handle.attempt)
            except CheckpointdError as error:
                self._journal.note("failed", tag=handle.tag, attempt=handle.attempt, error=error.code, message=str(error))


def train(options: argparse.Namespace) -> None:
    """Load, check every bit, then train and save without end."""
    rank = dist.get_rank()
    journal = Journal(options.journal / f"rank-{rank}.jsonl")
    training = Training(seed=options.seed, rank=rank, nbytes=options.nbytes)
    journal.note("up")
    link.ANSWER_S = options.sidecar_answer
    with Checkpointer(
        options.root, compression=options.compression, sidecar=options.sidecar, on_sidecar_loss=options.on_sidecar_loss
    ) as ckpt:
        loaded = ckpt.load(training.state)
        journal.note("loaded", start=ckpt.status().start, **_facts(training, loaded))
        save_endlessly(ckpt, training, journal, after=loaded.step if loaded else -1, every=options.save_every)


def save_endlessly(ckpt: Checkpointer, training: Training, journal: Journal, *, after: int, every: int) -> None:
    """Train the steps after `after` together with the other ranks, and save every so many."""
    watch = Watch(journal)
    for step in itertools.count(after + 1):
        training.advance(step)
        dist.barrier()
        if step % every == 0:
            watch.add(ckpt.save(step, training.state, client_state=training.client_state))


def _facts(training: Training, loaded: Any) -> dict[str, object]:
    if loaded is None:
        return {"step": -1, "source": "", "wrong": [], "fell_back_from": []}
    wrong = training.wrong(loaded.step)
    if loaded.client_state != {"seed": training.seed, "step": loaded.step}:
        wrong.append("client_state")
    return {"step": loaded.step, "source": loaded.source, "wrong": wrong, "fell_back_from": loaded.fell_back_from}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--journal", type=Path, required=True, help="directory of the journals")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--nbytes", type=int, required=True)
    parser.add_argument("--compression", default="auto")
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--sidecar", help="its socket")
    parser.add_argument("--on-sidecar-loss", default="inline")
    parser.add_argument("--sidecar-answer", type=float, default=link.ANSWER_S, help="seconds until one that hangs is lost")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(_options())
