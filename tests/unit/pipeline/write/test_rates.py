"""Estimates of tensors: how many samples many small ones take."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from checkpointd.codec import ElementType, Estimate
from checkpointd.pipeline.shard import Bytes
from checkpointd.pipeline.write import rates
from checkpointd.pipeline.write.rates import ALIKE_MIN, SMALL_BYTES, Rates
from tests.builders import Arrays, make_shard


def small(count: int, elements: int = 16) -> Arrays:
    random = np.random.default_rng(0)
    return {f"layers.{n}.bias": random.normal(size=elements).astype(np.float32) for n in range(count)}


@pytest.mark.parametrize(
    ("count", "elements", "samples"),
    [(10 * ALIKE_MIN, 16, 1), (ALIKE_MIN, 16, ALIKE_MIN), (ALIKE_MIN + 1, SMALL_BYTES // 4 + 1, ALIKE_MIN + 1)],
)
def test_many_small_tensors_alike_share_an_estimate(
    count: int, elements: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    sample: Callable[[Bytes, ElementType], Estimate] = rates.sample

    def counted(data: Bytes, element: ElementType) -> Estimate:
        seen.append(data.nbytes)
        return sample(data, element)

    monkeypatch.setattr(rates, "sample", counted)
    measured, shard = Rates(), make_shard(small(count, elements))
    found = measured.estimates(shard)
    assert len(seen) == samples
    assert found.keys() == {tensor.fqn for tensor in shard.tensors}
    assert measured.estimates(shard) == found
    assert len(seen) == samples


def test_tensors_without_elements_need_no_sample() -> None:
    shard = make_shard({f"empty.{n}": np.zeros(0, np.float32) for n in range(2 * ALIKE_MIN)})
    assert set(Rates().estimates(shard).values()) == {Estimate(zstd=1.0, planes=1.0)}


def test_the_estimate_of_many_is_about_that_of_each() -> None:
    """Half of them are zeros: what they share lies between, so all are compressed."""
    state = small(1000)
    state |= {fqn: np.zeros_like(array) for n, (fqn, array) in enumerate(state.items()) if n % 2}
    [shared] = set(Rates().estimates(make_shard(state)).values())
    assert 0.3 < shared.zstd < 0.7
