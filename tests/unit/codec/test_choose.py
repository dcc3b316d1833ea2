"""The choice of a codec: what the estimates say, and the model of a pipeline that decides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.codec import Compression, ElementType, Estimate, choose, encode, sample
from checkpointd.codec.choose import GAIN_MIN, ZSTD_SPEED

FLOAT32 = ElementType(4, "float")
BF16_WEIGHTS = Estimate(zstd=0.78, planes=0.66)
NOISE = Estimate(zstd=1.0, planes=1.0)
GB = 1e9

speeds = st.floats(1e6, 1e11)
ratios = st.floats(0.0001, 1.1)


def weights(count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return (np.random.default_rng(6).standard_normal(count) * 0.02).astype(np.float32)


def test_forced_compression_is_done_as_told() -> None:
    forced: dict[Compression, str] = {"none": "raw", "zstd": "zstd", "planes": "planes"}
    for compression, codec in forced.items():
        assert choose(compression, NOISE, disk_bps=None) == codec
        assert choose(compression, BF16_WEIGHTS, disk_bps=10 * GB, encode_bps=1.0) == codec


def test_slow_disk_compresses_and_fast_disk_does_not() -> None:
    assert choose("auto", BF16_WEIGHTS, disk_bps=0.2 * GB, encode_bps=1 * GB) == "planes"
    assert choose("auto", BF16_WEIGHTS, disk_bps=3 * GB, encode_bps=1 * GB) == "raw"


def test_more_threads_make_compressing_worth_it() -> None:
    assert choose("auto", BF16_WEIGHTS, disk_bps=1 * GB, encode_bps=1 * GB, threads=1) == "raw"
    assert choose("auto", BF16_WEIGHTS, disk_bps=1 * GB, encode_bps=1 * GB, threads=2) == "planes"


def test_an_unknown_disk_and_incompressible_data_are_stored_raw() -> None:
    assert choose("auto", Estimate(zstd=0.01, planes=0.01), disk_bps=None, threads=64) == "raw"
    assert choose("auto", NOISE, disk_bps=1e6) == "raw"


def test_zstd_is_chosen_where_it_is_the_smaller_and_fast_enough() -> None:
    repeats = Estimate(zstd=0.05, planes=0.5)
    assert choose("auto", repeats, disk_bps=0.1 * GB, encode_bps=1 * GB) == "zstd"
    assert choose("auto", repeats, disk_bps=0.9 * GB, encode_bps=1 * GB, threads=2) == "planes"


@given(zstd=ratios, planes=ratios, disk=speeds, speed=speeds, threads=st.integers(1, 64))
def test_auto_is_never_later_than_raw_and_no_other_codec_is_sooner(
    zstd: float, planes: float, disk: float, speed: float, threads: int
) -> None:
    codec = choose("auto", Estimate(zstd, planes), disk_bps=disk, encode_bps=speed, threads=threads)
    seconds = {
        "raw": (1 - GAIN_MIN) / disk,  # compressing has to beat this, not just raw
        "planes": max(1 / (speed * threads), planes / disk),
        "zstd": max(1 / (ZSTD_SPEED * speed * threads), zstd / disk),
    }
    assert seconds[codec] <= min(seconds.values()) * (1 + 1e-9)


@pytest.mark.parametrize(("disk_bps", "encode_bps", "threads"), [(0.0, 1.0, 1), (-1.0, 1.0, 1), (1.0, 0.0, 1), (1.0, 1.0, 0)])
def test_speeds_that_cannot_be_are_refused(disk_bps: float, encode_bps: float, threads: int) -> None:
    with pytest.raises(ValueError, match="need positive speeds"):
        choose("auto", NOISE, disk_bps=disk_bps, encode_bps=encode_bps, threads=threads)


def test_unknown_compression_is_refused() -> None:
    with pytest.raises(ValueError, match="compression is 'gzip', not one of auto, none, zstd, planes"):
        choose("gzip", NOISE, disk_bps=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [weights(1 << 20), np.zeros(1 << 20, np.float32), (weights(1 << 20).view("<u4") & 0xFFFF0000), weights(1000)],
    ids=["weights", "zeros", "from bfloat16", "small"],
)
def test_estimates_come_near_the_real_ratios(values: np.ndarray[tuple[int], np.dtype[np.generic]]) -> None:
    estimate = sample(values, FLOAT32)
    for codec, ratio in (("zstd", estimate.zstd), ("planes", estimate.planes)):
        real = encode(values, codec=codec, itemsize=4, kind="float").nbytes / values.nbytes
        assert ratio == pytest.approx(real, abs=0.02)


def test_sampling_looks_at_the_start_the_middle_and_the_end() -> None:
    noise = np.random.default_rng(7).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    thirds = {"start": slice(0, 16 << 10), "middle": slice(504 << 10, 520 << 10), "end": slice(-16 << 10, None)}
    for where in thirds.values():
        values = noise.copy()
        values[where] = 0
        assert sample(values, FLOAT32).planes == pytest.approx(2 / 3, abs=0.02)


def test_an_empty_tensor_gains_nothing() -> None:
    assert sample(b"", FLOAT32) == Estimate(zstd=1.0, planes=1.0)
