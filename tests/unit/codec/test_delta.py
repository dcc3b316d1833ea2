"""The codec `delta`: every difference comes back, near elements become small, and a wrong base is another result."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.codec import decode_delta, difference, encode
from checkpointd.errors import CodecError
from tests import format_reader

WIDTHS = (1, 2, 4, 8)


def stored_delta(raw: bytes, base: bytes, width: int) -> bytes:
    return bytes(encode(difference(raw, base, itemsize=width), codec="planes", itemsize=width, kind="other"))


def back(stored: bytes, base: bytes) -> bytes:
    out = np.zeros(len(base), np.uint8)
    decode_delta(stored, base, out=out)
    return out.tobytes()


@pytest.mark.parametrize("width", WIDTHS)
@given(pair=st.integers(1, 70).flatmap(lambda size: st.tuples(*[st.binary(min_size=size, max_size=size)] * 2)))
def test_any_two_chunks_of_any_length_come_back_also_in_the_reader_of_the_page(width: int, pair: tuple[bytes, bytes]) -> None:
    raw, base = pair
    stored = stored_delta(raw, base, width)
    assert back(stored, base) == raw == format_reader.undelta(stored, len(raw), base)


@pytest.mark.parametrize(
    ("now", "before", "zigzag"), [(5, 5, 0), (4, 5, 1), (6, 5, 2), (0, 0xFFFF, 2), (0xFFFF, 0, 1), (0x8005, 5, 0xFFFF)]
)
def test_small_differences_of_either_sign_are_small_numbers(now: int, before: int, zigzag: int) -> None:
    pair = [np.array([value], "<u2") for value in (now, before)]
    assert difference(*pair, itemsize=2).view("<u2")[0] == zigzag


def test_weights_that_moved_a_little_become_a_third() -> None:
    random = np.random.default_rng(1)
    before = (random.standard_normal(1 << 18) * 0.02).astype("<f4")
    after = before + (random.standard_normal(1 << 18) * 2e-5).astype("<f4")
    bf16 = [np.ascontiguousarray(values.view("<u2")[1::2]) for values in (after, before)]
    stored = encode(difference(*bf16, itemsize=2), codec="planes", itemsize=2, kind="other")
    assert stored.nbytes < 0.35 * bf16[0].nbytes
    assert stored.nbytes < 0.6 * encode(bf16[0], codec="planes", itemsize=2, kind="float").nbytes


def test_a_frame_for_another_size_is_refused() -> None:
    raw = bytes(range(100))
    with pytest.raises(CodecError, match="declares 100 bytes, not 96"):
        back(stored_delta(raw, raw, 4), raw[:96])
