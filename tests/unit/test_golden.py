"""The roots in tests/golden/format-3: read by this release, and by a reader that knows nothing but docs/FORMAT.md."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from checkpointd.commit.branches import newest_of
from checkpointd.config import LoadConfig
from checkpointd.errors import NotFoundError
from checkpointd.layout import tree
from checkpointd.layout.indexes import Index, decode_index, encode_index
from checkpointd.layout.log_records import Record, decode_entry, decode_state, encode_entry, encode_state
from checkpointd.layout.manifest import IndexRef, Lease, Mirrored, ReadBack, Shown, SmallObject, Vote, decode, encode
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import Checkpointer
from checkpointd_client.checkpointer import core_of
from tests import format_reader
from tests.golden.describe import describe
from tests.unit.client import composite_tensors

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "format-3"
SOLO = ["solo-none", "solo-zstd", "solo-planes"]
FILES = "files/.checkpointd"
SHARDS = [
    *((root, "global_step7", 0, "solo") for root in SOLO),
    ("references", "global_step3", 0, "references"),
    ("placed", "global_step1", 0, "placed"),
    ("tensor-kinds", "global_step1", 0, "tensor-kinds"),
    *(("own-parts", "global_step1", rank, f"own-parts-{rank}") for rank in range(2)),
    *(("two-ranks", tag, rank, f"two-ranks-{tag}-{rank}") for tag in ("best", "global_step3") for rank in range(2)),
]
LOGS = ("references", "two-ranks", "mirror", "history", "rebuilt", FILES)
ROOTS = [*SOLO, "placed", "tensor-kinds", "own-parts", *LOGS]
KINDS: dict[str, type[SmallObject]] = {
    ".vote": Vote,
    ".readback": ReadBack,
    "/record": Shown,
    "/leases/": Lease,
    ".checkpointd/mirror": Mirrored,
}


def expected(name: str) -> Any:
    return json.loads((GOLDEN / "expected" / f"{name}.json").read_text())


def small_objects() -> list[tuple[Path, type[SmallObject]]]:
    files = sorted(path for path in GOLDEN.rglob("*") if path.is_file())
    return [(p, kind) for p in files for hint, kind in KINDS.items() if hint in str(p.relative_to(GOLDEN))]


def entries() -> list[Path]:
    return sorted(GOLDEN.rglob("log/*.json"))


def indexes() -> list[Path]:
    return sorted(GOLDEN.rglob("*.index"))


def read_index(path: Path) -> tuple[IndexRef, Index]:
    """An index, and how its vote names it."""
    vote = path.with_name(f"{path.name[:5]}.vote")
    ref = decode(vote.read_bytes(), Vote, vote.name).index
    assert ref is not None
    return ref, decode_index(path.read_bytes(), ref.plan, path.name)


def copy(root: str, tmp_path: Path) -> Path:
    """A copy to load from, since that begins a start."""
    return Path(shutil.copytree(GOLDEN / root, tmp_path / root))


# --- what is there -----------------------------------------------------------------------------------------------------


def test_every_kind_of_object_node_and_codec_is_among_them() -> None:
    assert {kind for _, kind in small_objects()} == set(get_args(SmallObject))
    found = [read_index(path)[1] for path in indexes()]
    assert {chunk.codec for index in found for entry in index.tensors for chunk in entry.chunks} == {"raw", "zstd", "planes"}
    assert max(len(entry.chunks) for index in found for entry in index.tensors) > 1
    assert any(alias.offset for index in found for alias in index.aliases)
    assert any(index.excluded for index in found)
    of_files = [tree.files_of(index.tree) for index in found]
    assert all(file.placeholders and file.sums for files in of_files if files is not None for file in files.files)
    nodes = [node for index in found if not tree.files_of(index.tree) for node in walk(tree.decode(index.tree))]
    kinds = {(type(node), getattr(node, "kind", "")) for node in nodes}
    assert kinds >= {
        *((tree.Dict, kind) for kind in ("dict", "OrderedDict", "Counter")),
        *((tree.Sequence, kind) for kind in ("list", "tuple", "set", "frozenset", "Size")),
        *((tree.TorchName, kind) for kind in ("dtype", "device")),
    }
    assert {kind for kind, _ in kinds} == {type(None) if kind is None else kind for kind in get_args(tree.Node)}
    assert any(isinstance(node, tree.Tensor) and node.overlap for node in nodes)


def walk(node: tree.Node) -> list[tree.Node]:
    children: tuple[tree.Node, ...] = ()
    if isinstance(node, tree.Dict):
        children = tuple(part for item in node.items for part in item)
    elif isinstance(node, tree.Sequence):
        children = node.items
    elif isinstance(node, tree.Composite):
        children = (*(part for _, part in node.inner), node.context)
    elif isinstance(node, tree.Named):
        children = tuple(item for _, item in node.items)
    return [node, *(found for child in children for found in walk(child))]


def test_they_name_nobody() -> None:
    for path, kind in small_objects():
        found = decode(path.read_bytes(), kind, path.name)  # type: ignore[type-var]  # one of the five
        if not isinstance(found, Shown):
            assert (found.writer.host, found.writer.pid) == ("node7", 4711)


# --- the bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "kind"), small_objects(), ids=lambda value: getattr(value, "name", None))
def test_this_release_still_writes_the_same_bytes(path: Path, kind: type[SmallObject]) -> None:
    data = path.read_bytes()
    assert encode(decode(data, kind, path.name)) == data  # type: ignore[type-var]  # one of the five


@pytest.mark.parametrize("path", indexes(), ids=lambda path: f"{path.parents[2].name}-{path.parents[1].name}-{path.name}")
def test_this_release_still_writes_the_same_indexes_and_trees(path: Path) -> None:
    ref, index = read_index(path)
    assert encode_index(index, path.name) == (ref, path.read_bytes())
    assert tree.encode(tree.files_of(index.tree) or tree.decode(index.tree)) == index.tree


def test_this_release_still_writes_the_same_entries_and_states() -> None:
    broken = GOLDEN / "rebuilt" / "log" / "000000000002.json"
    for path in entries():
        if path != broken:
            entry = decode_entry(path.read_bytes(), int(path.stem))
            assert encode_entry(entry) == path.read_bytes(), path
    states = sorted(GOLDEN.rglob("log/*.state"))
    for path in states:
        assert encode_state(decode_state(path.read_bytes(), int(path.stem))) == path.read_bytes(), path
    assert [path.parents[1].name for path in states] == ["history", "rebuilt"]


def test_records_of_every_kind_are_among_them() -> None:
    found = {kind for path in entries() for kind in re.findall(r'"kind": "([a-z-]+)"', path.read_text())}
    assert found == {kind.__struct_config__.tag for kind in get_args(Record)}


# --- by this release ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ROOTS)
async def test_every_checkpoint_is_whole(root: str) -> None:
    async with PosixStore(GOLDEN / root) as store:
        for checkpoint in await root_view.checkpoints(store):
            verdict = await verify(store, checkpoint, LoadConfig())
            assert verdict.whole, verdict.damage


async def test_attempts_are_what_they_were() -> None:
    async with PosixStore(GOLDEN / "two-ranks") as store:
        assert {name: one.status for name, one in (await root_view.state_of(store)).attempts.items()} == {
            "best/00000001-0": "removed",
            "best/00000001-1": "checkpoint",
            "global_step2/00000001-0": "aborted",
            "global_step3/00000001-0": "checkpoint",
        }
        newest = newest_of(await root_view.state_of(store))
        assert newest is not None
        assert newest.tag == "global_step3"
        with pytest.raises(NotFoundError, match="global_step2 is not a checkpoint: 00000001-0 is aborted"):
            await root_view.find(store, "global_step2")


async def test_references_are_among_them_and_what_they_need_is_there() -> None:
    async with PosixStore(GOLDEN / "references") as store:
        assert {name: one.status for name, one in (await root_view.state_of(store)).attempts.items()} == {
            "global_step1/00000001-0": "removed",
            "global_step2/00000001-0": "removed",
            "global_step3/00000001-0": "checkpoint",
        }
        commit = (await root_view.find(store, "global_step3")).commit
        assert commit.holders == ("global_step1/00000001-0",)
        assert commit.metrics == {"loss": 1 / 3}


@pytest.mark.parametrize(("tag", "at"), [("global_step1", "global_step1"), ("runs--last", "runs/last")])
def test_files_are_what_they_were(tag: str, at: str) -> None:
    """As torch loads them from where they are shown, and as a reader made from the page finds them in the store."""
    shown = {path.name: path for path in (GOLDEN / "files" / at).iterdir()}
    loaded = {name: torch.load(path, weights_only=True) for name, path in shown.items()}
    state = dict(expected("files")["state"]["items"])
    assert sorted(describe(loaded)["items"]) == sorted(state[at]["items"])  # type: ignore[index,call-overload,arg-type]  # a mapping
    assert format_reader.files(GOLDEN / FILES, tag) == {name: path.read_bytes() for name, path in shown.items()}
    assert (GOLDEN / "files" / "latest").read_text() == "global_step1"


def test_a_start_beside_files_leaves_them_as_they_are(tmp_path: Path) -> None:
    beside = copy("files", tmp_path)
    before = {path: path.read_bytes() for path in beside.rglob("*.pt")}
    with Checkpointer(beside / ".checkpointd") as ckpt:
        assert [core_of(ckpt).damage(found, [0]) for found in core_of(ckpt).checkpoints()] == [(), ()]
    assert {path: path.read_bytes() for path in beside.rglob("*.pt")} == before
    assert not (beside / "runs" / "latest").exists()


@pytest.mark.parametrize("root", SOLO)
def test_a_state_loads_bit_for_bit(root: str, tmp_path: Path) -> None:
    state: dict[str, object] = {}
    with Checkpointer(copy(root, tmp_path)) as ckpt:
        loaded = ckpt.load(state)
    assert loaded is not None
    assert (loaded.tag, loaded.step) == ("global_step7", 7)
    assert {"state": describe(state), "client_state": describe(loaded.client_state)} == expected("solo")
    model = state["model"]
    assert isinstance(model, dict)
    assert model["head.weight"].data_ptr() == model["embed.weight"].data_ptr()


def test_a_state_loads_in_place(tmp_path: Path) -> None:
    embed, norm = torch.nn.Embedding(37, 48), torch.nn.BatchNorm1d(48)
    with Checkpointer(copy("solo-planes", tmp_path)) as ckpt:
        loaded = ckpt.load({"model": {"embed.weight": embed.weight, "norm.weight": norm.weight}}, strict=False)
    assert loaded is not None
    stored = dict(expected("solo")["state"]["items"][0][1]["items"])
    assert describe(embed.weight) == stored["embed.weight"]
    assert describe(norm.weight) == stored["norm.weight"]
    assert "tensors" in loaded.unexpected


def test_what_lay_on_a_mesh_loads_without_one(tmp_path: Path) -> None:
    state: dict[str, object] = {}
    with Checkpointer(copy("placed", tmp_path)) as ckpt:
        ckpt.load(state)
    assert describe(state) == expected("placed")["state"]


@pytest.mark.filterwarnings("ignore")  # torch warns that some of these kinds are in beta or deprecated
def test_tensors_of_every_kind_load_into_the_same_kind(tmp_path: Path) -> None:
    state: dict[str, object] = {}
    with Checkpointer(copy("tensor-kinds", tmp_path), tensor_classes=composite_tensors.OWN) as ckpt:
        ckpt.load(state)
    assert describe(state) == expected("tensor-kinds")["state"]


def on_two_ranks(root: Path, tmp_path: Path) -> list[Any]:
    """What each of two ranks loads from `root`."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}", "OMP_NUM_THREADS": "1"}
    program: list[str | Path] = [sys.executable, Path(__file__).with_name("golden_rank.py"), root]
    outs = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    ranks = [subprocess.Popen([*program, str(rank), out], env=environment) for rank, out in enumerate(outs)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    return [json.loads(out.read_text()) for out in outs]


@pytest.mark.nightly
@pytest.mark.e2e
def test_two_ranks_load_what_each_of_them_saved(tmp_path: Path) -> None:
    for rank, found in enumerate(on_two_ranks(copy("two-ranks", tmp_path), tmp_path)):
        assert found["None"] == {"tag": "global_step3", **expected(f"two-ranks-global_step3-{rank}")}
        best = expected(f"two-ranks-best-{rank}")
        assert found["best"]["state"] == best["state"]
        assert "00000001-0 is aborted" in found["global_step2"]


@pytest.mark.nightly
@pytest.mark.e2e
def test_two_ranks_load_their_own_parts_of_a_tensor_of_a_users_class(tmp_path: Path) -> None:
    found = on_two_ranks(copy("own-parts", tmp_path), tmp_path)
    assert [one["state"] for one in found] == [expected(f"own-parts-{rank}")["state"] for rank in range(2)]


# --- by a reader made from the page ------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ROOTS)
async def test_a_reader_made_from_the_page_finds_the_same_state_in_the_log(root: str) -> None:
    async with PosixStore(GOLDEN / root) as store:
        log = RootLog.of(store)
        state = await log.look()
    found = format_reader.Log(GOLDEN / root)
    assert not log.fault
    assert (found.number, found.nonce, found.heads) == (state.number, state.nonce, state.heads)
    facts = ("status", "verified", "damaged", "passed_over", "left_behind", "swept")
    theirs = {name: [one.get(fact) or None for fact in facts] for name, one in found.attempts.items()}
    assert theirs == {name: [getattr(one, fact) or None for fact in facts] for name, one in state.attempts.items()}


def test_branches_are_among_them_and_the_newest_is_of_the_current_one() -> None:
    root = GOLDEN / "history"
    left = [name for name, one in format_reader.Log(root).attempts.items() if one.get("left_behind")]
    assert left == [f"global_step{step}/00000001-0" for step in (25, 26)]
    assert format_reader.newest(root) == format_reader.latest(root) == "global_step25"
    assert format_reader.checkpoint(root, "global_step25")[0].name == "00000002-0"


def test_a_reader_made_from_the_page_does_without_a_state_that_is_damaged(tmp_path: Path) -> None:
    root = copy("history", tmp_path)
    [state] = root.rglob("*.state")
    whole = statuses(root)
    state.write_bytes(state.read_bytes()[:-2])
    assert statuses(root) == whole


def statuses(root: Path) -> dict[str, str]:
    return {name: one["status"] for name, one in format_reader.Log(root).attempts.items()}


def test_the_reader_knows_nothing_of_checkpointd() -> None:
    source = ast.parse(Path(format_reader.__file__).read_text())
    imported = {alias.name for node in ast.walk(source) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(source) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= {
        *("__future__", "json", "re", "struct", "pathlib", "typing", "zlib"),
        *("msgspec", "numpy", "xxhash", "zstandard"),
    }


@pytest.mark.parametrize(("root", "tag", "rank", "name"), SHARDS)
def test_a_reader_made_from_the_page_finds_the_same(root: str, tag: str, rank: int, name: str) -> None:
    assert format_reader.read(GOLDEN / root, tag, rank) == expected(name)


def test_a_reader_made_from_the_page_finds_the_way() -> None:
    root = GOLDEN / "two-ranks"
    assert format_reader.newest(root) == format_reader.latest(root) == "global_step3"
    assert format_reader.tags(root) == ["best", "global_step3"]
    assert format_reader.attempts(root, "best") == {"00000001-0": "removed", "00000001-1": "checkpoint"}
    assert format_reader.attempts(root, "global_step2") == {"00000001-0": "aborted"}
    assert format_reader.checkpoint(root, "best")[0].name == "00000001-1"
    with pytest.raises(format_reader.Damaged, match="global_step2 is no checkpoint"):
        format_reader.read(root, "global_step2", 0)


@pytest.mark.parametrize("pattern", ["log/*.json", "ballot-*", "*.index", "*.chunks"])
def test_a_reader_made_from_the_page_notices_damage(pattern: str, tmp_path: Path) -> None:
    root = copy("solo-zstd", tmp_path)
    [path, *_] = root.rglob(pattern)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises((format_reader.Damaged, ValueError)):
        format_reader.read(root, "global_step7", 0)
