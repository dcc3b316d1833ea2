"""PICKLE-1 to PICKLE-3: what a pickle names is neither run nor changed, and a small one stays small; plain values are those of
pickle.
"""

from __future__ import annotations

import collections
import pickle
import resource
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.errors import DamagedError, FormatError, UsageError
from checkpointd_client.integrations.conversion import metadata_file
from checkpointd_client.integrations.deepspeed.offline import safe_unpickle
from checkpointd_client.unpickling import unpickler
from checkpointd_client.unpickling.records import PickleFault, Record

FLAT = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.integers(-(1 << 63), (1 << 63) - 1) | st.text() | st.binary() | st.tuples(st.integers(0, 9), st.text())
VALUES = st.recursive(
    FLAT | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner) | st.dictionaries(KEYS, inner) | st.sets(KEYS) | st.frozensets(KEYS) | st.lists(inner).map(tuple)
    ),
)


@pytest.mark.nightly
@given(VALUES, st.integers(3, 5))
def test_plain_values_are_those_of_pickle(value: Any, protocol: int) -> None:
    makers = {"builtins.bytearray": bytearray, "builtins.set": set, "builtins.frozenset": frozenset}
    assert unpickler.read(pickle.dumps(value, protocol=protocol), makers) == value


# --- a file in the hands of a stranger --------------------------------------------------------------------------------


def text(value: bytes) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value


def given_state(module: bytes, name: bytes, attribute: bytes, value: bytes) -> bytes:
    """BUILD of that class or function with the slot state {attribute: value}."""
    return b"c" + module + b"\n" + name + b"\n" + b"N}" + text(attribute) + value + b"s\x86b"


LIVE = [
    (b"torch", b"Tensor", b"numel", b"ctorch._utils\n_rebuild_tensor\n"),
    (b"torch.nn.parameter", b"Parameter", b"evil", b"cos\nsystem\n"),
    (b"collections", b"Counter", b"get", b"K\x05"),
    (b"torch._utils", b"_rebuild_tensor_v2", b"__defaults__", b"K\x05\x85"),
    (b"torch", b"FloatStorage", b"evil", b"K\x05"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.nn.Parameter(torch.ones(2)), "c": {"d": [1, None]}}, path)
    return path


def rewritten(path: Path, data: bytes, compression: int = zipfile.ZIP_STORED, more: str = "") -> Path:
    """The file with another pickle in it."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, data if name.endswith("data.pkl") else content, compression)
        if more:
            archive.writestr(f"{next(iter(members)).partition('/')[0]}/{more}", b"")
    return path


@pytest.mark.parametrize(("module", "name", "attribute", "value"), LIVE)
def test_pickle_1_deepspeeds_file_changes_no_class_and_no_function(
    file: Path, module: bytes, name: bytes, attribute: bytes, value: bytes
) -> None:
    owner = getattr(__import__(module.decode(), fromlist=["x"]), name.decode())
    before = getattr(owner, attribute.decode(), "absent")
    rewritten(file, b"\x80\x02" + given_state(module, name, attribute, value) + b"0}.")
    with pytest.raises(DamagedError, match="not an object that this pickle made"):
        safe_unpickle.read(str(file))
    assert getattr(owner, attribute.decode(), "absent") is before
    assert torch.ones(3).numel() == 3


@pytest.mark.parametrize(
    ("module", "name", "attribute"),
    [
        (b"torch.distributed.checkpoint.metadata", b"ChunkStorageMetadata", b"__eq__"),
        (b"torch.serialization", b"_get_layout", b"cache"),
        (b"pathlib", b"PosixPath", b"__defaults__"),
    ],
)
def test_pickle_1_dcps_metadata_changes_no_class_and_no_function(
    tmp_path: Path, module: bytes, name: bytes, attribute: bytes
) -> None:
    owner = getattr(__import__(module.decode(), fromlist=["x"]), name.decode())
    before = getattr(owner, attribute.decode(), "absent")
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + given_state(module, name, attribute, b"K\x07\x85") + b"0}.")
    with pytest.raises(FormatError, match="not an object that this pickle made"):
        metadata_file.read(tmp_path)
    assert getattr(owner, attribute.decode(), "absent") is before


REFUSED = {
    "a call of what a call gave": (b"cos\nsystem\n(tR(tR.", "calls something that is not a name"),
    "a state for a function": (b"cos\nsystem\n}b.", "not an object that this pickle made"),
    "items for a class": (b"cos\nsystem\nNNs.", "not an object that this pickle made"),
    "a state for a tensor": (b"cmine\ntensor\n)R}b.", "changed after it was made"),
    "a state for text": (b"X\1\0\0\0a}X\1\0\0\0bNsb.", "damaged"),
    "a call with a list": (b"cos\nsystem\n]R.", "calls something"),
    "a name of another size": (b"c" + b"a" * 600 + b"\nb\n.", "of 602 characters"),
    "a registered extension": (b"\x82\x01.", "opcode 0x82"),
    "a class of protocol 0": (b"(ios\nsystem\n.", "opcode 0x69"),
    "a length beyond the file": (b"\x8d" + (1 << 62).to_bytes(8, "little") + b"x.", "cut off"),
    "a long bytearray": (b"\x96" + (1 << 42).to_bytes(8, "little") + b"x.", "cut off"),
    "a number that is far away": (b"Nr\xff\xff\xff\xff", "cut off"),
    "a frame beyond the file": (b"\x95" + (1 << 50).to_bytes(8, "little") + b"N", "cut off"),
    "a memo that is far away": (b"j\xff\xff\xff\xff.", "damaged"),
    "a list that contains itself": (b"]q\0h\0a.", "contains itself"),
    "tuples in tuples": (b")" + b"\x85" * 300 + b".", "nests deeper"),
    "lists in lists": (b"]" * 300 + b"a" * 299 + b".", "nests deeper"),
    "marks in marks": (b"(" * 300 + b".", "nests deeper"),
    "a billion laughs": (b"K\x01\x85" + b"2\x86" * 60 + b".", "without end"),
    "a billion laughs in a dict": (b"}X\1\0\0\0a" + b"K\x01\x85" + b"2\x86" * 60 + b"s.", "without end"),
    "a text that is told again and again": (
        b"(" + b"X\0\0\x01\0" + b"a" * (1 << 16) + b"q\0" + b"h\0" * 500 + b"t\x85.",
        "without end",
    ),
    "copies of copies": (
        b"(cbuiltins\nbytearray\nq\0B\0\0\x01\0" + bytes(1 << 16) + b"\x85q\x01" + b"1(" + b"h\0h\x01R" * 9 + b"t.",
        "without end",
    ),
    "sets of one list": (
        b"(cbuiltins\nset\nq\0]("
        + b"".join(b"M" + n.to_bytes(2, "little") for n in range(999))
        + b"e\x85q\x01"
        + b"1("
        + b"h\0h\x01R" * 50
        + b"t.",
        "without end",
    ),
    "lists": (b"(" + b"]" * 1024 + b"t.", "so many objects"),
    "sets": (b"(" + b"\x8f" * 1024 + b"t.", "so many objects"),
    "one value under many numbers": (b"N" + b"\x94" * 1024 + b".", "so many objects"),
    "a number of 256 bytes": (b"\x8b\0\1\0\0" + b"\1" * 256 + b".", "more than 255 bytes"),
    "nothing": (b".", "damaged"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_pickle_2_what_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, why = REFUSED[what]
    monkeypatch.setattr(unpickler, "UNFOLDED_MAX", 4096)
    monkeypatch.setattr(unpickler, "FREE_OBJECTS", 512)
    with bounded_memory(), pytest.raises(PickleFault, match=why):
        unpickler.read(b"\x80\x02" + data, {"builtins.bytearray": bytearray, "mine.tensor": object})


LAUGHS = b"K\x01\x85" + b"2\x86" * 30
"""A tuple that would be text of gigabytes."""


@pytest.mark.parametrize(
    "data",
    [
        b"cpathlib\nPosixPath\n" + LAUGHS + b"\x85R.",
        b"cpathlib\nPosixPath\n(X\0\0\x01\0" + b"a" * (1 << 16) + b"q\0" + b"h\0" * 50_000 + b"tR.",
        b"ctorch\nSize\n]" + LAUGHS + b"a\x85R.",
    ],
)
def test_pickle_2_nothing_that_was_read_is_told_in_an_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + data)
    with bounded_memory(), pytest.raises(FormatError, match="without end"):
        metadata_file.read(tmp_path)


def test_pickle_2_what_is_no_storage_is_not_told(file: Path) -> None:
    rewritten(file, b"\x80\x02" + LAUGHS + b"Q.")
    with bounded_memory(), pytest.raises(UsageError, match="without end"):
        safe_unpickle.read(str(file))


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Little more than there is."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (512 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


DEEP = (((((((((1,),),),),),),),),)
ODD_KEYS = [1 << 100, tuple(range(100)), 1j, ((0,) * 60, (0,) * 60)]


@pytest.mark.parametrize("key", ODD_KEYS)
def test_pickle_3_keys_a_key_that_is_slow_to_hash_is_a_record(key: Any) -> None:
    makers = {"builtins.complex": complex}
    for value in ({key: 1}, {key}, frozenset({key}), collections.OrderedDict({key: 1})):
        [found] = unpickler.read(pickle.dumps(value, protocol=4), makers)
        assert type(found) is Record
        assert found.args == (key,)


def test_pickle_3_keys_tuples_of_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickler, "CLASHES_MAX", 4)
    keys = [(-1, n) for n in range(9)] + [(-2, n) for n in range(9)]  # -1 and -2 have one hash
    found = unpickler.read(pickle.dumps(dict.fromkeys(keys)), {})
    assert [type(key) for key in found] == [tuple] * 13 + [Record] * 5
    assert unpickler.read(pickle.dumps([{(1, 2): 3}] * 9 + [{(-1, n): 1 for n in range(99)}]), {})[8] == {(1, 2): 3}


class Child:
    """It refers to its parent."""

    def __init__(self) -> None:
        self.parent = {"child": self}


def test_sound_files_are_read_with_records_of_what_is_odd(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    value = {"child": Child(), "wide": {1 << 100: 1}, torch.float32: 2, DEEP: 3, "quantized": quantized, "plain": [1]}
    torch.save(value, tmp_path / "file.pt")
    found = safe_unpickle.read(str(tmp_path / "file.pt"))
    assert (found["plain"], found[torch.float32], found[DEEP]) == ([1], 2, 3)
    assert {type(found["child"]), type(next(iter(found["wide"]))), type(found["quantized"])} == {Record}
    deep: list[Any] = []
    for _ in range(250):
        deep = [deep]
    torch.save({"deep": deep}, tmp_path / "file.pt")
    with pytest.raises(UsageError, match="is too large to read: it nests deeper than 200"):
        safe_unpickle.read(str(tmp_path / "file.pt"))


def test_what_no_maker_makes_is_a_record() -> None:
    found = unpickler.read(pickle.dumps([collections.UserDict({"a": 1}), collections.deque([1, 2]), torch.float32]), {})
    assert [record.name for record in found] == ["collections.UserDict", "collections.deque", "torch.float32"]
    assert (found[0].state, found[1].items, found[2].args) == ({"data": {"a": 1}}, [1, 2], None)
    assert all(type(record) is Record for record in found)
