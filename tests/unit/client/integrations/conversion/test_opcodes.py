"""PICKLE-1 to PICKLE-3: what a pickle names is neither run nor changed, and a small one stays small; plain
values are those of pickle.
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
from checkpointd_client.integrations.conversion import metadata_file, opcodes
from checkpointd_client.integrations.conversion.records import PickleFault, Record
from checkpointd_client.integrations.deepspeed.offline import safe_unpickle

FLAT = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.integers(-(1 << 63), (1 << 63) - 1) | st.text() | st.binary() | st.tuples(st.integers(0, 9), st.text())
VALUES = st.recursive(
    FLAT | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner) | st.dictionaries(KEYS, inner) | st.sets(KEYS) | st.frozensets(KEYS) | st.lists(inner).map(tuple)
    ),
)


@given(VALUES, st.integers(3, 5))
def test_plain_values_are_those_of_pickle(value: Any, protocol: int) -> None:
    makers = {"builtins.bytearray": bytearray, "builtins.set": set, "builtins.frozenset": frozenset}
    assert opcodes.read(pickle.dumps(value, protocol=protocol), makers) == value


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
def test_pickle_2_deepspeeds_file_changes_no_class_and_no_function(
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
def test_pickle_2_dcps_metadata_changes_no_class_and_no_function(
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
    "a state for a tensor's storage": (
        b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0" + b"0X\3\0\0\0cpuK\x06tQ}b.",
        "given a state",
    ),
    "a registered extension": (b"\x82\x01.", "opcode 0x82"),
    "a class of protocol 0": (b"(ios\nsystem\n.", "opcode 0x69"),
    "a length beyond the file": (b"\x8d" + (1 << 62).to_bytes(8, "little") + b"x.", "cut off"),
    "a memo that is far away": (b"j\xff\xff\xff\xff.", "did not remember"),
    "a list that contains itself": (b"]q\0h\0a.", "contains itself"),
    "tuples in tuples": (b")" + b"\x85" * 300 + b".", "nests deeper"),
    "lists in lists": (b"]" * 300 + b"a" * 299 + b".", "nests deeper"),
    "marks in marks": (b"(" * 300 + b".", "nests deeper"),
    "a billion laughs": (b"K\x01\x85" + b"2\x86" * 60 + b".", "without end"),
    "a billion laughs in a dict": (b"}X\1\0\0\0a" + b"K\x01\x85" + b"2\x86" * 60 + b"s.", "without end"),
    "a text that is told again and again": (
        b"(" + b"X\0\0\x10\0" + b"a" * (1 << 20) + b"q\0" + b"h\0" * 50_000 + b"t\x85.",
        "without end",
    ),
    "copies of copies": (
        b"(cbuiltins\nbytearray\nq\0B\0\0\x01\0" + bytes(1 << 16) + b"\x85q\x01" + b"1(" + b"h\0h\x01R" * 100 + b"t.",
        "copies its own parts",
    ),
    "sets of one list": (
        b"(cbuiltins\nset\nq\0]("
        + b"".join(b"M" + n.to_bytes(2, "little") for n in range(9999))
        + b"e\x85q\x01"
        + b"1("
        + b"h\0h\x01R" * 100
        + b"t.",
        "copies its own parts",
    ),
    "more than one value": (b"NN.", "one value"),
    "nothing": (b".", "one value"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_pickle_3_what_is_refused(what: str) -> None:
    data, why = REFUSED[what]
    with pytest.raises(PickleFault, match=why):
        opcodes.read(b"\x80\x02" + data, {"builtins.bytearray": bytearray}, persistent=lambda _: torch.UntypedStorage(4))


def test_pickle_3_what_a_file_is_made_of_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opcodes, "OBJECTS_MAX", 100)
    with pytest.raises(PickleFault, match="more than 100 containers"):
        opcodes.read(b"\x80\x02(" + b"]" * 101 + b"t.", {})


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
def test_pickle_3_nothing_that_was_read_is_told_in_an_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + data)
    with bounded_memory(), pytest.raises(FormatError, match="damaged"):
        metadata_file.read(tmp_path)


def test_pickle_3_what_is_no_storage_is_not_told(file: Path) -> None:
    rewritten(file, b"\x80\x02" + LAUGHS + b"Q.")
    with bounded_memory(), pytest.raises(DamagedError, match="something other than a storage"):
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
def test_pickle_4_a_key_that_is_slow_to_hash_is_a_record(key: Any) -> None:
    makers = {"builtins.complex": complex}
    for value in ({key: 1}, {key}, frozenset({key}), collections.OrderedDict({key: 1})):
        [found] = opcodes.read(pickle.dumps(value, protocol=4), makers)
        assert type(found) is Record
        assert found.args == (key,)


def test_pickle_4_tuples_of_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opcodes, "CLASHES_MAX", 4)
    keys = [(-1, n) for n in range(9)] + [(-2, n) for n in range(9)]  # -1 and -2 have one hash
    found = opcodes.read(pickle.dumps(dict.fromkeys(keys)), {})
    assert [type(key) for key in found] == [tuple] * 13 + [Record] * 5
    assert opcodes.read(pickle.dumps([{(1, 2): 3}] * 9 + [{(-1, n): 1 for n in range(99)}]), {})[8] == {(1, 2): 3}


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
    found = opcodes.read(pickle.dumps([collections.UserDict({"a": 1}), collections.deque([1, 2]), torch.float32]), {})
    assert [record.name for record in found] == ["collections.UserDict", "collections.deque", "torch.float32"]
    assert (found[0].state, found[1].items, found[2].args) == ({"data": {"a": 1}}, [1, 2], None)
    assert all(type(record) is Record for record in found)


# --- files of torch.save ---------------------------------------------------------------------------------------------


def test_files_of_torch_save_are_read(tmp_path: Path) -> None:
    tied = torch.arange(12.0)
    value = {
        "dtypes": [torch.zeros(3, dtype=dtype) for dtype in (torch.bfloat16, torch.uint16, torch.float8_e4m3fn, torch.bool)],
        "views": [tied, tied[2:8].reshape(2, 3), torch.ones(1).expand(5), torch.tensor(3), torch.zeros(0, 4)],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "module": torch.nn.Linear(2, 2).state_dict(),
        "optimizer": torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict(),
        "plain": [torch.Size([1, 2]), torch.bfloat16, {1, 2}, b"bytes", 1j, bytearray(b"x"), collections.Counter("aab")],
    }
    value["parameter"].ds_id = 3
    torch.save(value, tmp_path / "file.pt")
    found, expected = safe_unpickle.read(str(tmp_path / "file.pt")), torch.load(tmp_path / "file.pt", weights_only=False)
    torch.testing.assert_close(found.pop("views"), expected.pop("views"))
    for ours, theirs in zip(found.pop("dtypes"), expected.pop("dtypes"), strict=True):
        assert (ours.dtype, ours.shape, ours.view(torch.uint8).tolist()) == (
            theirs.dtype,
            theirs.shape,
            theirs.view(torch.uint8).tolist(),
        )
    assert type(found["parameter"]) is torch.nn.Parameter
    for key in ("parameter", "module"):
        torch.testing.assert_close(found.pop(key), expected.pop(key))
    assert found == expected


def test_conjugates_and_negatives(tmp_path: Path) -> None:
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    imaginary, odd = conjugate.clone().conj().imag, torch.zeros(2)
    value = {"conjugate": conjugate, "imaginary": imaginary, "parameter": torch.nn.Parameter(conjugate), "attribute": odd}
    odd.mine = 1  # type: ignore[attr-defined]
    torch.save(value, tmp_path / "file.pt")
    found = safe_unpickle.read(str(tmp_path / "file.pt"))
    assert (found["conjugate"].is_conj(), found["imaginary"].is_neg()) == (True, True)
    torch.testing.assert_close(found, value)


def test_metadata_of_a_tensor_that_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._utils, "get_tensor_metadata", lambda _: {"upside_down": True})
    torch.save({"a": torch.ones(2)}, tmp_path / "file.pt")
    with pytest.raises(DamagedError, match="the metadata upside_down, which is not known"):
        safe_unpickle.read(str(tmp_path / "file.pt"))


def test_a_tensor_that_unfolds_to_more_than_it_holds(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1).expand(1 << 40)}, tmp_path / "file.pt")
    with pytest.raises(DamagedError, match="in a storage of 4 bytes"):
        safe_unpickle.read(str(tmp_path / "file.pt"))


def test_a_compressed_pickle(file: Path) -> None:
    rewritten(file, b"\x80\x02}.", zipfile.ZIP_DEFLATED)
    with pytest.raises(DamagedError, match="is compressed"):
        safe_unpickle.read(str(file))


def test_a_program_of_torchscript(file: Path) -> None:
    rewritten(file, b"\x80\x02}.", more="constants.pkl")
    with pytest.raises(DamagedError, match="TorchScript"):
        safe_unpickle.read(str(file))
