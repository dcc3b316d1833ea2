"""Pipelines: each rank has layers of its own, and an optimizer for these; what all of them saved goes into other stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from checkpointd.config import Ranks
from checkpointd.errors import MismatchError
from checkpointd_client.ranks.board import StoreBoard
from checkpointd_client.ranks.load_messages import CandidateChoice
from checkpointd_client.ranks.load_rounds import LoadRounds
from checkpointd_client.restore.content import RankContent
from checkpointd_client.restore.merging import Merging
from checkpointd_client.restore.plan import LoadOptions, Restoration, prepare
from checkpointd_client.restore.store_source import prepared, stands_below
from tests.unit.client.capture_and_fill import Saved, same, save

Make = Callable[[nn.Module], torch.optim.Optimizer]


def stage(layers: Iterable[int], make: Make, seed: int, biases: Iterable[int] = range(9)) -> dict[str, Any]:
    """A stage with these layers, after a step."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({str(i): nn.Linear(3, 3, bias=i in tuple(biases)) for i in layers})
    optimizer = make(model)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return {"m": model, "o": optimizer}


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.5)


def named(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters(), 0.5)


def decaying(model: nn.Module, rate: Any = 0.5, *, empty: bool = False) -> torch.optim.Optimizer:
    """One group that decays, and one that does not, unless it would be empty."""
    found = [[p for p in model.parameters() if (p.dim() > 1) == decays] for decays in (True, False)]
    pairs = [(p, w) for p, w in zip(found, (0.25, 0.0), strict=True) if p or empty]
    groups = [{"params": p, "weight_decay": w, "lr": copy.deepcopy(rate)} for p, w in pairs]
    return torch.optim.AdamW(groups, foreach=False)


class Job:
    """What the ranks of a job saved together, each with layers of its own."""

    def __init__(self, *states: dict[str, Any]) -> None:
        self.ranks: list[Saved] = [save(state) for state in states]

    def content(self, keep: int | None = None, *, alone: bool = True) -> RankContent:
        merging = Merging(lambda rank, fqn: (self.ranks[rank].entries[fqn], self.ranks[rank].data[fqn]), keep)
        order = sorted(range(len(self.ranks)), key=lambda rank: (rank != keep, rank))
        root = merging.merged([((rank,), self.ranks[rank].tree) for rank in order])
        return RankContent(
            root=root,
            entries={fqn: self.ranks[rank].entries[fqn] for fqn, rank in merging.chosen.items()},
            owners=merging.chosen,
            aliases=(),
            excluded=(),
            left=frozenset(merging.left),
            elsewhere=frozenset() if alone else frozenset(merging.partial),
            among_many=not alone,
        )

    def load(self, state: dict[str, Any], content: RankContent, *, strict: bool = True) -> Restoration:
        def data(fqn: str) -> bytes:
            return self.ranks[content.owners[fqn]].data[fqn]

        restoration = prepare(state, content, LoadOptions(strict), equal=lambda one, two: data(one) == data(two))
        for target in restoration.targets:
            self.ranks[content.owners[target.fqn]].fill_one(target)
        restoration.finish()
        return restoration


def expect_same(states: Iterable[dict[str, Any]], loaded: dict[str, Any]) -> None:
    """Every parameter has the state that it was saved with, and the settings of its group."""
    wanted = {name: at for state in states for name, at in _by_name(state).items()}
    found = _by_name(loaded)
    assert found
    assert same(found, {name: wanted[name] for name in found})


def _by_name(state: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = state["m"], state["o"]
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return {
        name: (
            parameter.detach(),
            dict(sorted(optimizer.state[parameter].items())),
            {key: at for key, at in sorted(groups[id(parameter)].items()) if key not in ("params", "param_names")},
        )
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("make", [plain, named, decaying, lambda model: decaying(model, torch.tensor(0.5))])
@pytest.mark.parametrize("biases", [range(9), (0,), (1,)], ids=["all", "first", "last"])
def test_stages_go_into_one_process_and_into_stages_that_are_swapped(make: Make, biases: tuple[int, ...]) -> None:
    """Those of two and of one param group, too."""
    saved = [stage((i,), make, i, biases) for i in range(2)]
    job = Job(*saved)
    loads = [((0, 1), None), ((1,), 0), ((0,), 1), ((1, 0), 0)]
    for layers, keep in loads:
        loaded = stage(layers, make, 5, biases)
        restoration = job.load(loaded, job.content(keep, alone=keep is None))
        expect_same(saved, loaded)
        assert not restoration.mismatched
        for group in loaded["o"].param_groups:
            if make is named:
                names = {id(p): name for name, p in loaded["m"].named_parameters()}
                assert group["param_names"] == [names[id(p)] for p in group["params"]]


def test_a_stage_of_one_group_of_each_kind_goes_into_a_model_of_both() -> None:
    """Their groups stand at one position, and are not the same."""

    def one(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 0.5, weight_decay=0.25 if "0" in model else 0.0)

    def both(model: nn.Module) -> torch.optim.Optimizer:
        layers = ((model.get_submodule(i), w) for i, w in (("1", 0.0), ("0", 0.25)))
        return torch.optim.AdamW([{"params": layer.parameters(), "weight_decay": w} for layer, w in layers], 0.1)

    saved = [stage((i,), one, i) for i in range(2)]
    job, loaded = Job(*saved), stage((0, 1), both, 5)
    job.load(loaded, job.content())
    expect_same(saved, loaded)
    with pytest.raises(MismatchError, match=r"o\.param_groups\.0: its parameters are those of the stored groups \[0, 1\]"):
        job.load(stage((0, 1), plain, 5), job.content())


def test_a_group_that_is_empty_on_a_stage_has_the_settings_of_the_others() -> None:
    saved = [stage((i,), lambda m: decaying(m, empty=True), i, biases=(0,)) for i in range(2)]
    job = Job(*saved)
    for i in range(2):
        loaded = stage((i,), lambda m: decaying(m, 0.125, empty=True), 5, biases=(0,))
        job.load(loaded, job.content(1 - i, alone=False))
        assert [(group["lr"], group["weight_decay"]) for group in loaded["o"].param_groups] == [(0.5, 0.25), (0.5, 0.0)]


def test_groups_whose_rate_is_a_tensor_stand_at_other_positions_on_other_stages() -> None:
    """The rate of the biases stands in the second group of one stage, and in the first of the other."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return decaying(model, torch.tensor(0.5))

    def biases(model: nn.Module) -> torch.optim.Optimizer:
        model.get_submodule("1").weight.requires_grad_(requires_grad=False)
        return torch.optim.AdamW([model.get_submodule("1").bias], torch.tensor(0.5), weight_decay=0.0, foreach=False)

    saved = [stage((0,), make, 0), stage((1,), biases, 1)]
    loaded = stage((0, 1), make, 5)
    restoration = Job(*saved).load(loaded, Job(*saved).content(), strict=False)
    assert restoration.mismatched == ()
    assert restoration.missing == ("o.state.m.1.weight",)
    assert [(float(group["lr"]), group["weight_decay"]) for group in loaded["o"].param_groups] == [(0.5, 0.25), (0.5, 0.0)]


def test_one_group_takes_the_parameters_of_several_stored_ones_of_the_same_settings() -> None:
    def layered(model: nn.Module) -> torch.optim.Optimizer:
        layers = [list(layer.parameters()) for layer in model.children()]
        return torch.optim.AdamW([{"params": found, "lr": torch.tensor(0.5)} for found in layers], foreach=False)

    def one(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), torch.tensor(0.25), foreach=False)

    saved, loaded = stage((0, 1), layered, 0), stage((0, 1), one, 5)
    Job(saved).load(loaded, Job(saved).content())
    expect_same([saved], loaded)


def test_ranks_that_differ_about_one_parameter_are_told_and_not_as_another_kind_of_object() -> None:
    saved = [stage((0,), lambda m, rate=rate: torch.optim.AdamW(m.parameters(), rate), 0) for rate in (0.5, 0.25)]
    job = Job(*saved)
    with pytest.raises(MismatchError, match=r"o\.param_groups: the ranks that saved it had different values") as caught:
        job.load(stage((0,), plain, 5), job.content())
    assert "AdamW is there now" not in str(caught.value)


# --- what the ranks agree on ---


class Source:
    """What the job saved, as one of as many ranks sees it."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank

    def content(self) -> RankContent:
        saved = self.job.ranks[self.rank]
        own = dict.fromkeys(saved.entries, self.rank)
        return RankContent(root=saved.tree, entries=saved.entries, owners=own, aliases=(), excluded=())

    def more(self) -> RankContent:
        return self.job.content(self.rank, alone=False)

    def has_elsewhere(self, places: Sequence[str], content: RankContent) -> bool:
        return stands_below(places, content)

    def equal(self, one: str, two: str, content: RankContent) -> bool:
        raise AssertionError("nothing is tied")


def judged(job: Job, *states: dict[str, Any], strict: bool) -> list[tuple[Any, tuple[str, ...]]]:
    """What all ranks find out about loading what `job` saved."""
    store, world = HashStore(), len(states)

    def load(rank: int) -> tuple[Any, tuple[str, ...]]:
        who = Ranks(rank=rank, world_size=world)
        turn = LoadRounds(StoreBoard(store, who), who, 30.0, 30.0).begin()
        turn.chosen("candidate", lambda: CandidateChoice(tag="x"))
        source: Any = Source(job, rank)
        content = source.content() if len(job.ranks) == world else job.content(alone=False)
        if len(job.ranks) != world:
            source.more = lambda: None
        try:
            _, restoration = prepared(source, states[rank], content, LoadOptions(strict))
        except MismatchError as error:
            return turn.judge("verdict", error, None, strict=strict)
        return turn.judge("verdict", None, restoration, strict=strict)

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(load, range(world)))


@pytest.mark.parametrize("strict", [True, False])
def test_nothing_is_unexpected_where_stages_together_have_a_place_for_all_of_one_process(strict: bool) -> None:
    job = Job(stage((0, 1), plain, 0))
    assert judged(job, stage((0,), plain, 5), stage((1,), plain, 6), strict=strict) == [(None, ())] * 2


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("strict", [True, False])
def test_a_layer_that_one_stage_lost_is_named_on_all_and_those_of_other_stages_are_not(strict: bool, momentum: float) -> None:
    """The other stage looks at what it saved itself alone."""

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.5, momentum=momentum)

    job = Job(stage((0, 1), sgd, 0), stage((2,), sgd, 1))
    lost = ("m.1.bias", "m.1.weight", "o.state.m.1.bias", "o.state.m.1.weight")
    for error, nowhere in judged(job, stage((0,), sgd, 5), stage((2,), sgd, 6), strict=strict):
        if strict:
            assert error.mismatches == tuple(
                f"{fqn}: in the checkpoint, and nowhere in the objects of any rank" for fqn in lost
            )
        else:
            assert (error, nowhere) == (None, lost)
    assert judged(job, stage((0,), sgd, 5), stage((2, 1), sgd, 6), strict=strict) == [(None, ())] * 2


def test_without_strict_a_stage_that_is_all_new_keeps_no_other_from_loading() -> None:
    def one(layer: int) -> dict[str, Any]:
        return stage((layer,), plain, layer)

    job = Job(one(0), one(1))
    lost = ("m.1.bias", "m.1.weight", "o.state.m.1.bias", "o.state.m.1.weight")
    for layers in ((0, 7), (7, 0), (0, 7, 8)):
        assert judged(job, *map(one, layers), strict=False) == [(None, lost)] * len(layers)
    for error, _ in judged(job, one(7), one(8), strict=False):
        assert isinstance(error, MismatchError)
        assert all(line.endswith("weight: missing from the checkpoint") for line in error.mismatches[:1])
