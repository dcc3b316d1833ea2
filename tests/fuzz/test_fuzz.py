"""The fuzzers' share of the gate and the night, with seeds from Hypothesis so that a failure names its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.e2e.deepspeed_launch import NEEDS_DEEPSPEED
from tests.every_object import KINDS, keys_of
from tests.fuzz.fuzz_files import EVERY, corpora, fuzz, sum_of_outcomes
from tests.fuzz.fuzz_wire import decode_one, fuzz_decoder, fuzz_sessions

SEEDS = st.integers(min_value=1 << 40, max_value=1 << 60)


@given(SEEDS)
def test_decoder(seed: int) -> None:
    """WIRE-1, WIRE-2"""
    decode_one(seed)


@given(SEEDS)
def test_session(seed: int) -> None:
    """SESSION-1 to SESSION-3: five clients after one another at one daemon."""
    fuzz_sessions(range(seed, seed + 5))


def test_the_inputs_get_somewhere() -> None:
    """A fuzzer whose inputs are all refused at once finds nothing."""
    assert fuzz_decoder(range(500)) > 200
    assert fuzz_sessions(range(60)) > 300


@pytest.mark.nightly
@NEEDS_DEEPSPEED
@pytest.mark.timeout(450)  # it waits where a file is missing or cannot be read, and a loaded machine makes that long
def test_files(pytestconfig: pytest.Config) -> None:
    """Each changed root or file gives what was saved, or says what is wrong; the seeds are the same in every run."""
    with corpora() as corpus:
        assert [kind for kind in KINDS if not keys_of(corpus / EVERY, kind)] == []
        assert [name for name in ("*.file", "record") if not any((corpus / "files").rglob(name))] == []
        found = fuzz(range(pytestconfig.getoption("--fuzzed-files")), corpus)
    assert {"newest", "older, and said", "refused", "read"} <= sum_of_outcomes(found).keys()
