"""An object is asked for its state once in a load, and on every rank or none; with a thread for each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from checkpointd.config import LoadConfig, Ranks
from checkpointd.errors import CheckpointdError, DamagedError, StateError
from checkpointd.layout.keys import AttemptId
from checkpointd.store.memory import MemoryStore
from checkpointd.store.patient import Patience
from checkpointd_client.capture.dtypes import copy_bits
from checkpointd_client.loaded import Loaded
from checkpointd_client.loader import Candidate, Loader
from checkpointd_client.ranks.board import StoreBoard
from checkpointd_client.ranks.load_messages import CandidateChoice
from checkpointd_client.ranks.load_rounds import LoadRounds
from checkpointd_client.ranks.writer import WriterThread
from checkpointd_client.restore.bind import Target
from checkpointd_client.restore.content import RankContent
from checkpointd_client.restore.plan import LoadOptions
from checkpointd_client.restore.store_source import CandidateSource, prepared
from checkpointd_client.restore.target_chooser import Described, LoadTargets
from tests.unit.client.capture_and_fill import Saved, save, tensor_of

WORLD = 2
State = dict[str, Any]


class App:
    """Hands out what it holds, and notes that it was asked."""

    def __init__(self, name: str, asked: list[str], tensor: torch.Tensor | None = None, *, fails: bool = False) -> None:
        self.name, self.asked, self.fails = name, asked, fails
        self.tensor = torch.zeros(2) if tensor is None else tensor

    def state_dict(self) -> State:
        self.asked.append(self.name)
        if self.fails:
            raise OSError("a worker is gone")
        return {"w": self.tensor}

    def load_state_dict(self, state: State) -> None:
        assert type(state["w"]) is type(self.tensor)
        self.tensor = state["w"]


@dataclass
class Kept:
    """A checkpoint of two apps, of which this rank saved all, and other ranks a tensor more."""

    saved: Saved
    tag: str = "x"
    step: int = 1
    kind: Literal["store", "memory"] = "store"
    damaged: bool = False

    def content(self) -> RankContent:
        owners = dict.fromkeys(self.saved.entries, 0)
        return RankContent(root=self.saved.tree, entries=self.saved.entries, owners=owners, aliases=(), excluded=())

    def more(self) -> RankContent | None:
        return self.content()

    def has_elsewhere(self, places: Sequence[str], content: RankContent) -> bool:
        return False

    def equal(self, one: str, two: str, content: RankContent) -> bool:
        raise AssertionError("nothing is tied")

    def locate(self, targets: Sequence[Target], content: RankContent) -> None:
        pass

    def verify(self, targets: Sequence[Target], content: RankContent) -> None:
        if self.damaged:
            raise DamagedError("torn", rank=1)

    def fill(self, targets: Sequence[Target], content: RankContent) -> None:
        self.verify(targets, content)
        for target in targets:
            dtype, shape = self.saved.entries[target.fqn]
            copy_bits(target.tensor, tensor_of(self.saved.data[target.fqn], dtype, shape))


def kept() -> Kept:
    return Kept(save({"ema": App("ema", [], torch.ones(2)), "app": App("app", [], torch.ones(2)), "m": nn.Linear(1, 1)}))


@dataclass(slots=True)
class Simulated(Loader):
    """Of the checkpoints `sources`, which all ranks see."""

    sources: list[Kept] = field(default_factory=list)

    def _choose(self, number: int, tag: str | None) -> CandidateChoice:
        return CandidateChoice(tag="x", attempt=str(AttemptId(1, number)))

    async def _check_whole(self, candidate: Candidate, patience: Patience) -> None:
        pass

    def _removed(self, candidate: Candidate) -> None:
        pass

    def _stored_source(self, candidate: Candidate) -> CandidateSource:  # type: ignore[override]  # of no store
        return self.sources.pop(0)


Outcome = Loaded | CheckpointdError | None


@pytest.fixture
def writer() -> Iterator[WriterThread]:
    writer = WriterThread(threads=1)
    yield writer
    writer.close()


def load(
    states: Sequence[State | Chooser], writer: WriterThread, sources: Callable[[int], list[Kept]], *, verify_first: bool = False
) -> list[Outcome]:
    """What load(strict=False) gives on each rank."""
    store = dist.HashStore()

    def on_rank(rank: int) -> Outcome:
        ranks = Ranks(rank=rank, world_size=WORLD)
        turn = LoadRounds(StoreBoard(store, ranks), ranks, 30.0, 30.0).begin()
        config, memory = LoadConfig(), MemoryStore()
        options = LoadOptions(strict=False, verify_first=verify_first)
        loader = Simulated(memory, writer, ranks, config, turn, 30.0, states[rank], options, sources=sources(rank))
        try:
            return loader.load(None, fallback=True)
        except CheckpointdError as error:
            return error

    with ThreadPoolExecutor(WORLD) as threads:
        return list(threads.map(on_rank, range(WORLD)))


def states(asked: Sequence[list[str]], **of_rank_1: Any) -> list[State]:
    """The same objects on both ranks, which hold them in different orders; rank 1 may have more, ahead of them."""
    of_rank_0 = {"ema": App("ema", asked[0]), "app": App("app", asked[0]), "m": nn.Linear(1, 1)}
    return [of_rank_0, {**of_rank_1, "app": App("app", asked[1]), "ema": App("ema", asked[1]), "m": nn.Linear(1, 1)}]


def test_a_rank_that_looks_at_what_others_saved_asks_no_object_again(writer: WriterThread) -> None:
    asked: list[list[str]] = [[], []]
    outcomes = load(states(asked, new=torch.ones(1)), writer, lambda _: [kept()])
    assert [outcome.missing for outcome in outcomes if isinstance(outcome, Loaded)] == [(), ("new",)]
    assert asked == [["app", "ema"]] * WORLD


class Chooser:
    """Takes a part of a checkpoint, as `load_optimizer_states=False` does."""

    def __init__(self, state: State) -> None:
        self.state = state

    def places(self, stored: Described) -> LoadTargets:
        assert stored.keys() >= self.state.keys()
        return LoadTargets(self.state)


def test_the_objects_of_a_part_of_a_checkpoint_are_asked_too(writer: WriterThread) -> None:
    asked: list[list[str]] = [[], []]
    choosers = [Chooser({name: state[name] for name in ("app", "m")}) for state in states(asked)]
    assert all(isinstance(outcome, Loaded) for outcome in load(choosers, writer, lambda _: [kept()]))
    assert asked == [["app"]] * WORLD


def test_a_rank_whose_match_ends_early_asks_as_the_others_do(writer: WriterThread) -> None:
    asked: list[list[str]] = [[], []]
    of_both = states(asked)
    astray = torch.optim.SGD(nn.Linear(1, 1).parameters()).state_dict()
    of_both[1] = {"m": astray, "app": of_both[1]["app"], "ema": of_both[1]["ema"]}
    for outcome in load(of_both, writer, lambda _: [kept()]):
        assert isinstance(outcome, StateError)
        assert "state_dict" in str(outcome)
    assert asked == [["app", "ema"]] * WORLD


def test_a_rank_whose_object_fails_asks_the_next_one_all_the_same(writer: WriterThread) -> None:
    asked: list[list[str]] = [[], []]
    of_both = states(asked)
    of_both[1]["app"].fails = True
    for outcome in load(of_both, writer, lambda _: [kept()]):
        assert isinstance(outcome, StateError)
        assert "app: state_dict() of " in str(outcome)
        assert "OSError: a worker is gone" in str(outcome)
    assert asked == [["app", "ema"]] * WORLD


@pytest.mark.parametrize("verify_first", [True, False])
def test_an_object_is_not_asked_again_for_the_checkpoint_before_a_damaged_one(
    writer: WriterThread, *, verify_first: bool
) -> None:
    asked: list[list[str]] = [[], []]

    def two(rank: int) -> list[Kept]:
        older, newer = kept(), kept()
        newer.damaged = rank == 1
        return [newer, older]

    for outcome in load(states(asked), writer, two, verify_first=verify_first):
        assert isinstance(outcome, Loaded)
        assert outcome.fell_back_from
    assert asked == [["app", "ema"]] * WORLD


def test_a_rank_alone_asks_once_and_fills_what_it_was_given() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        live = distribute_tensor(torch.zeros(2), DeviceMesh("cpu", [0]), [Shard(0)])
        app, source = App("app", [], live), kept()
        state = {"app": app, "new": torch.ones(1)}
        content, restoration = prepared(source, state, source.content(), LoadOptions(strict=False))
        source.fill(restoration.targets, content)
        restoration.finish()
        assert app.asked == ["app"]
        assert app.tensor is live
        assert isinstance(live, DTensor)
        assert live.full_tensor().tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()
