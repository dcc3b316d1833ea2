"""The fuzzers' share of every test run: some hundred inputs, seeds from Hypothesis so that a failure names its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.fuzz_wire import decode_one, fuzz_decoder, fuzz_sessions

SEEDS = st.integers(min_value=1 << 40, max_value=1 << 60)


@given(SEEDS)
def test_decoder(seed: int) -> None:
    """W1, W2"""
    decode_one(seed)


@given(SEEDS)
def test_session(seed: int) -> None:
    """Y1 to Y3: five clients after one another at one daemon."""
    fuzz_sessions(range(seed, seed + 5))


def test_the_inputs_get_somewhere() -> None:
    """A fuzzer whose inputs are all refused at once finds nothing."""
    assert fuzz_decoder(range(500)) > 200
    assert fuzz_sessions(range(60)) > 300
