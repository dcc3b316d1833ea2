"""RESHARD-1 to RESHARD-3: what is read before and after a change of ranks, batch sizes and workers is each sample once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from checkpointd.errors import MismatchError, StateError, UsageError
from checkpointd_client import Checkpointer
from checkpointd_client.integrations.torchdata import ReshardingLoader, ReshardingSampler


def loaders(size: int, ranks: int, batch_size: int = 1, *, drop_last: bool = False, **options: Any) -> list[ReshardingLoader]:
    """The loaders of all ranks of one job."""
    samples: Any = range(size)
    return [
        ReshardingLoader(
            DataLoader(
                samples,
                batch_size=batch_size,
                drop_last=drop_last,
                sampler=ReshardingSampler(samples, ranks, rank, seed=3, drop_last=drop_last, **options),
            )
        )
        for rank in range(ranks)
    ]


def read(job: list[ReshardingLoader], steps: int | None = None) -> tuple[list[list[int]], dict[str, Any]]:
    """The samples of each step, in the order of the epoch, and the state after them, which is that of every rank."""
    iterators = [iter(loader) for loader in job]
    found: list[list[int]] = []
    while steps is None or len(found) < steps:
        batches = [next(iterator, None) for iterator in iterators]
        if any(batch is None for batch in batches):
            assert all(batch is None for batch in batches)
            break
        # Rank r has the samples r, r + ranks, ... of those of the step.
        found.append([int(sample) for samples in zip(*batches, strict=True) for sample in samples])  # type: ignore[arg-type]
    states = [loader.state_dict() for loader in job]
    assert all(state == states[0] for state in states)
    return found, states[0]


def load(job: list[ReshardingLoader], state: dict[str, Any]) -> list[ReshardingLoader]:
    for loader in job:
        loader.load_state_dict(dict(state))
    return job


def order(size: int, epoch: int = 0) -> list[int]:
    """The order of an epoch, as one rank of a DistributedSampler has it."""
    samples: Any = range(size)
    sampler = DistributedSampler(samples, 1, 0, seed=3)
    sampler.set_epoch(epoch)
    return list(sampler)


def flat(steps: list[list[int]]) -> list[int]:
    return [sample for step in steps for sample in step]


@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=4),
    st.booleans(),
)
def test_reshard_3_each_sample_is_read_once_whatever_the_ranks_and_batch_sizes_are(
    size: int, jobs: list[tuple[int, int, int]], shuffle: bool
) -> None:
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for ranks, batch_size, steps in jobs:
        job = loaders(size, ranks, batch_size, shuffle=shuffle)
        found, state = read(job if state is None else load(job, state), steps)
        seen += flat(found)
        if state["epoch"] == 1:
            break
    assert state is not None
    if state["epoch"] == 0:
        ranks = jobs[-1][0]
        seen += flat(read(load(loaders(size, ranks, shuffle=shuffle), state))[0])
    expected = order(size) if shuffle else list(range(size))
    assert seen[:size] == expected
    assert len(seen) - size < ranks  # so many samples fill up the last batches


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(0, 9))
def test_reshard_3_with_drop_last_only_the_last_batch_of_an_epoch_is_left_out(
    size: int, before: int, after: int, batch_size: int, steps: int
) -> None:
    found, state = read(loaders(size, before, batch_size, drop_last=True), steps)
    seen = flat(found)
    if state["epoch"] == 0:
        seen += flat(read(load(loaders(size, after, batch_size, drop_last=True), state))[0])
    assert seen == order(size)[: len(seen)]
    assert size - len(seen) < max(before, after) * batch_size


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_without_a_change_it_reads_what_a_distributed_sampler_reads(ranks: int, drop_last: bool) -> None:
    samples: Any = range(23)
    for epoch in (0, 1):
        for rank in range(ranks):
            ours = ReshardingSampler(samples, ranks, rank, seed=3, drop_last=drop_last)
            torchs = DistributedSampler(samples, ranks, rank, seed=3, drop_last=drop_last)
            ours.set_epoch(epoch)
            torchs.set_epoch(epoch)
            assert list(ours) == list(torchs)
            assert len(ours) == len(torchs)


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_job_that_was_interrupted_reads_like_one_that_was_not(steps: int) -> None:
    whole = flat(read(loaders(23, 2, 2))[0])
    first, state = read(loaders(23, 2, 2), steps)
    assert flat(first) + flat(read(load(loaders(23, 2, 2), state))[0]) == whole


def test_reshard_1_steps_of_as_many_samples_are_the_same_on_any_number_of_ranks() -> None:
    on_two, on_three = read(loaders(24, 2, 6))[0], read(loaders(24, 3, 4))[0]
    assert on_two == on_three == [order(24)[i : i + 12] for i in (0, 12)]


def test_after_the_last_batch_the_state_is_the_beginning_of_the_next_epoch() -> None:
    job = loaders(8, 2, 2)
    _, at_the_last_batch = read(job, 2)  # in the body of the loop, the pass has not ended
    assert (at_the_last_batch["epoch"], at_the_last_batch["samples_seen"]) == (1, 0)
    again = load(loaders(8, 1, 4), at_the_last_batch)
    assert again[0].epoch == 1
    again[0].set_epoch(1)
    assert flat(read(again)[0]) == order(8, 1)
    assert (again[0].epoch, flat(read(again)[0])) == (2, order(8, 2))


def test_an_epoch_that_is_chosen_begins_at_its_beginning_and_the_same_one_goes_on() -> None:
    _, state = read(loaders(10, 1, 2), 2)
    [loader] = load(loaders(10, 1, 2), state)
    loader.set_epoch(0)
    assert flat(read([loader], 1)[0]) == order(10)[4:6]
    loader.set_epoch(5)
    assert loader.state_dict()["samples_seen"] == 0
    assert flat(read([loader])[0]) == order(10, 5)


def test_a_pass_that_was_left_begins_again() -> None:
    [loader] = loaders(10, 1, 2)
    read([loader], 2)
    assert flat(read([loader])[0]) == order(10)


def test_a_state_before_the_first_batch_is_the_one_that_was_loaded() -> None:
    _, state = read(loaders(10, 1, 2), 2)
    assert load(loaders(10, 2), state)[0].state_dict() == state


def test_reshard_2_what_workers_have_read_ahead_does_not_count() -> None:
    samples: Any = range(12)
    loader = ReshardingLoader(
        DataLoader(samples, batch_size=2, num_workers=1, prefetch_factor=4, sampler=ReshardingSampler(samples))
    )
    iterator = iter(loader)
    first = next(iterator).tolist()
    assert loader.state_dict()["samples_seen"] == 2
    assert first == list(ReshardingSampler(samples))[:2]


def test_the_length_is_that_of_a_whole_epoch() -> None:
    _, state = read(loaders(10, 1, 2), 2)
    assert len(load(loaders(10, 1, 2), state)[0]) == 5


def test_a_loader_whose_samples_cannot_be_counted_is_refused() -> None:
    samples: Any = range(4)
    with pytest.raises(UsageError, match=r"has a SequentialSampler: pass sampler=ReshardingSampler\(dataset\)"):
        ReshardingLoader(DataLoader(samples))
    with pytest.raises(UsageError, match="An iterable dataset has no order that ranks share"):
        ReshardingLoader(DataLoader(_Stream()))
    with pytest.raises(UsageError, match="has a SequentialSampler"):
        ReshardingLoader(DataLoader(samples, batch_sampler=BatchSampler(ReshardingSampler(samples), 2, False)))
    with pytest.raises(UsageError, match="with batch_size"):
        ReshardingLoader(DataLoader(samples, batch_size=None, sampler=ReshardingSampler(samples)))


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_a_position_in_another_order_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    [loader] = loaders(10, 1, 2)
    with Checkpointer(tmp_path) as ckpt:
        read([loader], 2)
        ckpt.save(1, {"w": torch.zeros(1), "loader": loader}).wait()
        [same] = loaders(10, 1, 2)
        ckpt.load({"w": torch.zeros(1), "loader": same})
        assert flat(read([same])[0]) == order(10)[4:]
        for other, words in (
            (loaders(11, 1), r"^(.|\n)*loader: dataset_size was 10 and is 11 now"),
            (loaders(10, 1, shuffle=False), "loader: shuffle was True and is False now"),
        ):
            with pytest.raises(MismatchError, match=words):
                ckpt.load({"w": torch.zeros(1), "loader": other[0]})


def test_its_state_dict_is_refused_in_its_place(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt, pytest.raises(StateError, match=r"the state_dict\(\) of a data loader"):
        ckpt.save(1, {"loader": loaders(10, 1)[0].state_dict()})


def test_counting_is_of_samples_not_of_values() -> None:
    """Equal samples at different places of the dataset stay different samples."""
    samples: Any = [7] * 6
    loader = ReshardingLoader(DataLoader(samples, batch_size=2, sampler=ReshardingSampler(samples)))
    assert Counter(flat([batch.tolist() for batch in loader])) == {7: 6}


def test_workers_that_hand_out_batches_in_any_order_are_refused() -> None:
    """The samples that were given out would be no first part of the order."""
    samples: Any = range(4)
    loader = DataLoader(samples, sampler=ReshardingSampler(samples), num_workers=1, in_order=False)
    with pytest.raises(UsageError, match="in_order=False"):
        ReshardingLoader(loader)


def test_a_pass_ends_with_an_error_once_another_position_was_loaded() -> None:
    (loader,) = loaders(6, 1)
    passing = iter(loader)
    next(passing)
    state = loader.state_dict()
    next(passing)
    loader.load_state_dict(state)
    with pytest.raises(UsageError, match="begin another `for batch in loader`"):
        next(passing)
    assert loader.state_dict() == state
    assert flat(read([loader])[0]) == order(6)[1:]


def test_of_two_passes_at_once_the_first_ends_with_an_error() -> None:
    (loader,) = loaders(6, 1)
    one, two = iter(loader), iter(loader)
    next(one)
    assert int(next(two)) == order(6)[0]
    with pytest.raises(UsageError, match="another pass was begun"):
        next(one)
    assert [int(sample) for sample in two] == order(6)[1:]
    assert loader.epoch == 1


def test_an_epoch_that_is_set_inside_a_pass_comes_after_it() -> None:
    (loader,) = loaders(6, 1)
    for _ in loader:
        loader.set_epoch(3)
    assert loader.epoch == 3
