from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from checkpointd.layout import tree
from checkpointd.layout.boxes import Box
from checkpointd.layout.indexes import Alias
from checkpointd.pipeline.shard import Shard, ShardTensor
from checkpointd.store.base import Store
from tests.builders import break_file, make_shard, objects, rank_arrays, save_checkpoint
from tests.unit.cli.conftest import Cli, With

VALUES: dict[str, tree.Node] = {
    "state": tree.Dict(
        "dict", (("lr", 0.1), ("betas", tree.Sequence("tuple", (0.9, 0.999))), (3, tree.Tensor("model.weight")))
    ),
    "client_state": tree.Dict(
        "dict", (("start", 3), ("name", "run\x1b[31m"), ("none", None), ("raw", tree.Bytes(b"\x00\xff")))
    ),
}
TIED = Alias("model.tied", "model.weight", (64, 48), (48, 1), 0)


async def one(store: Store) -> None:
    await save_checkpoint(
        store,
        tag="global_step7",
        compression="planes",
        values=VALUES,
        aliases=(TIED,),
        excluded=("model.frozen",),
    )


def test_json_has_every_tensor_of_every_rank(root: Path, at: With, cli: Cli) -> None:
    at(one)
    found = cli("inspect", root, "global_step7", "--json").json
    assert (found["tag"], found["attempt"], found["step"], found["world_size"]) == ("global_step7", "00000001-0", 7, 2)
    for rank, report in enumerate(found["ranks"]):
        shown = {t["fqn"]: (t["dtype"], tuple(t["shape"]), t["raw_bytes"]) for t in report["tensors"]}
        assert shown == {fqn: (a.dtype.name, a.shape, a.nbytes) for fqn, a in rank_arrays(rank).items()}
        assert all(t["box"] is None for t in report["tensors"])
        assert report["aliases"] == [["model.tied", "model.weight", [64, 48], [48, 1], 0]]
        assert report["excluded"] == ["model.frozen"]
        assert report["values"] is None


def test_totals_add_up(root: Path, at: With, cli: Cli) -> None:
    at(one)
    found = cli("inspect", root, "global_step7", "--json").json
    tensors = [tensor for report in found["ranks"] for tensor in report["tensors"]]
    codecs = found["contents"]["codecs"]
    for field in ("raw_bytes", "stored_bytes"):
        total = sum(tensor[field] for tensor in tensors)
        assert found["contents"][field] == total == sum(codec[field] for codec in codecs)
    assert {codec["codec"] for codec in codecs} == {"planes", "raw"}
    assert sum(codec["chunks"] for codec in codecs) == sum(c["chunks"] for t in tensors for c in t["codecs"])
    weight = next(t for t in tensors if t["fqn"] == "model.weight")
    assert [(c["codec"], c["chunks"]) for c in weight["codecs"]] == [("planes", math.ceil(64 * 48 * 4 / 4096))]


def test_plain_columns_name_tensor_shape_codec_and_ratio(root: Path, at: With, cli: Cli) -> None:
    at(one)
    answer = cli("inspect", root, "latest")
    assert answer.code == 0
    rows = {line.split()[0]: line.split() for line in answer.lines if line.startswith(("model.", "optimizer."))}
    assert rows["model.weight"][1:5] == ["float32", "64x48", "planes", "12.0KiB"]
    assert 0 < float(rows["model.weight"][6]) < 1
    assert rows["optimizer.step"][1:] == ["int64", "scalar", "raw", "8B", "8B", "1.000"]
    assert rows["model.empty"][1:] == ["float32", "0x4", "-", "0B", "0B", "-"]
    assert rows["model.tied"][1:5] == ["=", "64x48", "shares", "model.weight"]
    assert "left out on purpose (frozen): model.frozen" in answer.lines


def test_values_are_shown_when_asked_for_without_what_a_terminal_obeys(root: Path, at: With, cli: Cli) -> None:
    at(one)
    answer = cli("inspect", root, "global_step7", "--rank", "1", "--values")
    rows = [line.split() for line in answer.lines]
    assert ["lr", "float", "0.1"] in rows
    assert ["betas", "tuple", "(0.9,", "0.999)"] in rows
    assert ["client_state.name", "str", r"run\x1b[31m"] in rows
    assert ["client_state.raw", "bytes", "00ff"] in rows
    assert "\x1b" not in answer.out
    [report] = cli("inspect", root, "global_step7", "--rank", "1", "--values", "--json").json["ranks"]
    assert report["rank"] == 1
    assert {"path": "client_state.name", "kind": "str", "text": "run\x1b[31m"} in report["values"]
    assert not any(value["text"] == "model.weight" for value in report["values"])


def test_only_the_rank_and_the_tensors_asked_for(root: Path, at: With, cli: Cli) -> None:
    at(one)
    found = cli("inspect", root, "global_step7", "--rank", "1", "--tensors", "*.step*", "--json").json
    assert [report["rank"] for report in found["ranks"]] == [1]
    assert [t["fqn"] for t in found["ranks"][0]["tensors"]] == ["optimizer.steps", "optimizer.step"]
    assert found["contents"]["raw_bytes"] == 7 * 8 + 8


def test_a_rank_or_tensor_that_is_not_there(root: Path, at: With, cli: Cli) -> None:
    at(one)
    answer = cli("inspect", root, "global_step7", "--rank", "2")
    assert (answer.code, answer.out) == (2, "")
    assert "there is no rank 2: global_step7 was saved by 2 ranks, 0 to 1" in answer.err
    answer = cli("inspect", root, "global_step7", "--tensors", "nothing.*")
    assert answer.code == 4
    assert "no tensor of global_step7 matches 'nothing.*'" in answer.err


def test_a_part_of_a_tensor_shows_its_box(root: Path, at: With, cli: Cli) -> None:
    def half(rank: int) -> Shard:
        base = make_shard({"w": np.full((2, 6), rank, dtype=np.float32)})
        [part] = base.tensors
        box = Box((2 * rank, 0), (2, 6))
        own = ShardTensor("w", "float32", (4, 6), box, "global", part.offset, part.nbytes, part.itemsize)
        return Shard(buffer=base.buffer, tensors=(own,), tree=base.tree)

    async def save(store: Store) -> None:
        await save_checkpoint(store, shard_of=half)

    at(save)
    found = cli("inspect", root, "global_step1", "--json").json
    assert [r["tensors"][0]["box"] for r in found["ranks"]] == [[[0, 0], [2, 6]], [[2, 0], [2, 6]]]
    whole = found["tensors"]
    assert [(t["fqn"], t["shape"], t["raw_bytes"]) for t in whole] == [("w", [4, 6], 96)]
    assert whole[0]["boxes"] == [[0, [[0, 0], [2, 6]]], [1, [[2, 0], [2, 6]]]]
    assert "2x6@2,0 of 4x6" in cli("inspect", root, "global_step1", "--rank", "1").out
    answer = cli("inspect", root, "global_step1")
    assert "all ranks: 1 tensor, 96B raw, 96B stored" in answer.lines
    assert ["w", "float32", "4x6", "2", "of", "2x6", "0-1", "raw", "96B", "96B", "1.000"] in [
        line.split() for line in answer.lines
    ]
    assert "rank 1: 0 tensors, 1 box of those above, 48B raw, 48B stored" in answer.lines


@pytest.mark.parametrize("fault", ["flip", "truncate", "remove"])
def test_a_rank_with_a_damaged_index_is_said_and_the_others_are_shown(root: Path, at: With, cli: Cli, fault: str) -> None:
    at(one)
    break_file(objects(root, "00000.index")[0], fault)
    answer = cli("inspect", root, "global_step7")
    assert answer.code == 5
    assert "rank 1: 6 tensors" in answer.out
    assert "global_step7/00000001-0/00000.index" in answer.out
    first, second = cli("inspect", root, "global_step7", "--json").json["ranks"]
    assert (first["damage"]["rank"], second["damage"]) == (0, None)


def test_an_attempt_that_was_not_committed_cannot_be_inspected(root: Path, at: With, cli: Cli) -> None:
    async def failed(store: Store) -> None:
        await save_checkpoint(store, failing={0: RuntimeError("boom")})

    at(failed)
    answer = cli("inspect", root, "global_step1", "--json")
    assert answer.code == 4
    assert answer.error["code"] == "NotFoundError"
    assert f"00000001-0 is aborted; `checkpointd explain {root} global_step1` says why" in answer.error["message"]
