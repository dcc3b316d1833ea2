"""A reader of format version 3 made from docs/FORMAT.md and the pages in docs/format/ alone: it shows that they are enough.

It imports nothing of checkpointd and checks every digest on the way. What it finds is given as `tests/golden/describe.py`
describes values.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
import zstandard

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}


class Damaged(Exception):
    """Something does not agree with what the page says."""


def check(holds: bool, what: object) -> None:
    if not holds:
        raise Damaged(what)


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


# --- small objects, and the way to the indexes -------------------------------------------------------------------------


def small_object(path: Path, kind: str) -> dict[str, Any]:
    return small_object_in(path.read_bytes(), kind, path)


def small_object_in(data: bytes, kind: str, path: object) -> dict[str, Any]:
    match = re.search(rb'\n  "checksum": "([0-9a-f]{32})"\n}\n\Z', data)
    check(match is not None, f"{path}: no checksum")
    assert match is not None
    check(digest(data[: match.start(1)] + b"0" * 32 + data[match.end(1) :]) == match[1].decode(), f"{path}: checksum")
    found: dict[str, Any] = json.loads(data)
    check((next(iter(found)), found["format"], found["version"]) == ("format", f"checkpointd.{kind}", 3), f"{path}: format")
    return found


def latest(root: Path) -> str:
    return (root / "latest").read_text().removesuffix("\n")


Order = tuple[int, int]
"""The start, and the number of the save in it."""


class Log:
    """The attempts that a log knows, by `<tag>/<attempt>`, as a state has them, and what else a state says of them."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "log"
        self.names = sorted(path.name for path in self.folder.iterdir())
        states = self.numbers("state")
        check(self.numbers("rebuild")[-1:] <= states[-1:], "the log is being made again")
        self.number, self.nonce = 0, ""
        self.attempts: dict[str, dict[str, Any]] = {}
        self.heads: dict[str, str] = {}
        for number in reversed(states):
            try:
                self.take_state(number)
                break
            except (Damaged, ValueError):
                continue
        for number in self.numbers("json"):
            if number > self.number:
                self.take_entry(number)
        check(self.number >= max(states, default=0), "a state is damaged, and nothing else tells what it says")

    def numbers(self, kind: str) -> list[int]:
        return [int(name[:12]) for name in self.names if re.fullmatch(rf"\d{{12}}\.{kind}", name)]

    def take_state(self, number: int) -> None:
        state = small_object(self.folder / f"{number:012d}.state", "state")
        check(state["number"] == number, "a state was moved")
        self.number, self.nonce, self.heads = number, state["nonce"], state.get("heads", {})
        self.attempts = {one["attempt"]: one for one in state["attempts"]}

    def take_entry(self, number: int) -> None:
        entry = small_object(self.folder / f"{number:012d}.json", "entry")
        fits = (number, number, self.nonce) == (self.number + 1, entry["number"], entry["before"])
        check(fits, f"entry {number} does not follow")
        self.number, self.nonce = number, entry["nonce"]
        for record in entry["records"]:
            self.take(record)
        if number % 64 == 0:
            forgotten = [name for name, one in self.attempts.items() if 0 < one.get("swept", 0) <= number - 128]
            for name in forgotten:
                del self.attempts[name]

    def take(self, record: dict[str, Any]) -> None:
        match record["kind"]:
            case "begin":
                for name, one in self.attempts.items():
                    if one["status"] == "undecided" and name not in record.get("spared", ()):
                        one["status"] = "aborted"
            case "announce" | "hold" as kind:
                status = "undecided" if kind == "announce" else "removed"
                self.attempts[record["attempt"]] = {**record, "status": status}
            case "commit":
                self.attempts[record["attempt"]] |= {"status": "checkpoint", "commit": record}
                self.commit(record)
            case "abort":
                self.attempts[record["attempt"]] |= {"status": "aborted", "abort": record}
            case "remove":
                for name in record["attempts"]:
                    self.attempts[name] |= {"status": "removed", "removal": record}
                self.choose_heads()
            case "swept":
                for name in record["attempts"]:
                    self.attempts[name]["swept"] = self.number
            case "verified":
                self.attempts[record["attempt"]] |= {"verified": True, "damaged": ""}
            case "damaged":
                self.attempts[record["attempt"]] |= {"verified": False, "damaged": record["why"]}
            case "passed-over":
                self.attempts[record["attempt"]]["passed_over"] = record["why"]
            case "rollback":
                one = self.attempts[record["attempt"]]["commit"]
                self.leave(one, goes_back=True)
                self.heads[training(one)] = record["attempt"]
            case kind:
                raise Damaged(f"a record of the kind {kind}")

    # --- branches ---

    def commit(self, commit: dict[str, Any]) -> None:
        if commit.get("left"):
            self.leave(commit)
        head = self.attempts.get(self.heads.get(training(commit), ""))
        if head is None or order(head["commit"]) < order(commit):
            self.heads[training(commit)] = commit["attempt"]
        elif head["commit"].get("left"):
            self.leave(head["commit"])

    def leave(self, head: dict[str, Any], *, goes_back: bool = False) -> None:
        """Note which checkpoints are left behind, or no longer, if `head` is the newest of the current branch."""
        gaps = [(tuple(since), tuple(until)) for since, until in head.get("left", ())]
        base = order(head) if goes_back or not gaps else gaps[-1][0]
        alike = [one for one in self.attempts.values() if "commit" in one and training(one["commit"]) == training(head)]
        returns = any(one.get("left_behind") and order(one["commit"]) == base for one in alike)
        for one in alike:
            at = order(one["commit"])
            if one["status"] != "checkpoint" or (at > order(head) and not goes_back):
                continue
            if at > order(head) or any(since < at < until for since, until in gaps):
                one["left_behind"] = True
            elif returns and at <= base:
                one["left_behind"] = False

    def choose_heads(self) -> None:
        """Of each training whose head was removed, the newest checkpoint that is there is the head."""
        for own, head in [*self.heads.items()]:
            if self.attempts[head]["status"] == "checkpoint":
                continue
            del self.heads[own]
            there = [one for one in self.attempts.values() if one["status"] == "checkpoint" and not one.get("left_behind")]
            alike = [one["commit"] for one in there if training(one["commit"]) == own]
            if alike:
                self.heads[own] = max(alike, key=order)["attempt"]

    def checkpoints(self) -> list[dict[str, Any]]:
        """Newest first, and those that were left behind after all others."""
        found = [one for one in self.attempts.values() if one["status"] == "checkpoint"]
        found.sort(key=lambda one: (not one.get("left_behind"), order(one["commit"])), reverse=True)
        return found


def order(commit: dict[str, Any]) -> Order:
    return int(commit["attempt"].rpartition("/")[2].partition("-")[0]), commit["n"]


def training(commit: dict[str, Any]) -> str:
    """The directory of the training whose checkpoint it is."""
    shown = commit.get("shown_at", "")
    own = commit.get("unfinished", "")
    parent: str = shown.rpartition("/")[0]
    return parent.rpartition("/")[0] if own and not own.endswith("-whole") else parent


def newest(root: Path) -> str:
    """The tag of the newest checkpoint of the current branch that may be the newest."""
    found = (one for one in Log(root).checkpoints() if one["commit"].get("save_latest", True) and not one.get("left_behind"))
    return str(next(found)["attempt"].rpartition("/")[0])


def tags(root: Path) -> list[str]:
    """The tags with a checkpoint."""
    return sorted({one["attempt"].rpartition("/")[0] for one in Log(root).checkpoints()})


def attempts(root: Path, tag: str) -> dict[str, str]:
    """What became of every attempt at `tag`."""
    found = Log(root).attempts.items()
    return {name.rpartition("/")[2]: one["status"] for name, one in found if name.rpartition("/")[0] == tag}


def checkpoint(root: Path, tag: str) -> tuple[Path, dict[str, Any]]:
    """Directory and commit of the newest checkpoint of `tag`, of the current branch if it has one."""
    own = [one["commit"] for one in Log(root).checkpoints() if one["attempt"].rpartition("/")[0] == tag]
    check(bool(own), f"{tag} is no checkpoint")
    return root / own[0]["attempt"], own[0]


def index_of(root: Path, tag: str, rank: int) -> tuple[Path, dict[str, Any]]:
    folder, commit = checkpoint(root, tag)
    vote = vote_of(folder, commit, rank)
    check((vote["tag"], vote["attempt"], vote["rank"], vote["vote"]) == (tag, folder.name, rank, "yes"), folder)
    return folder, read_index(folder, vote)


def vote_of(folder: Path, commit: dict[str, Any], rank: int) -> dict[str, Any]:
    """The vote of `rank` in the ballot; only the table and this vote are read."""
    with open(folder / f"ballot-{commit['ballot']['digest']}", "rb") as file:
        table = file.read(24 * commit["world_size"])
        check(digest(table) == commit["ballot"]["digest"], "ballot")
        rows = list(struct.iter_unpack("<16sQ", table))
        check(len(rows) == commit["world_size"] and len(table) + sum(n for _, n in rows) == commit["ballot"]["size"], "ballot")
        file.seek(len(table) + sum(n for _, n in rows[:rank]))
        data = file.read(rows[rank][1])
    check(xxhash.xxh3_128_digest(data) == rows[rank][0], f"vote of rank {rank}")
    return small_object_in(data, "vote", f"vote of rank {rank}")


def read_index(folder: Path, vote: dict[str, Any]) -> dict[str, Any]:
    ref = vote["index"]
    check(re.fullmatch(rf"{vote['rank']:05d}(-[1-9]\d*)?\.index", ref["name"]) is not None, ref["name"])
    data = (folder / group(ref["name"]) / ref["name"]).read_bytes()
    check((digest(data), len(data)) == (ref["digest"], ref["size"]), ref["name"])
    plan = plan_of(data, vote)
    index: dict[str, Any] = msgspec.msgpack.decode(data[ref["plan"]["size"] :])
    check((index["format"], index["version"]) == ("checkpointd.index", 3), ref["name"])
    for name in ("tag", "attempt", "rank", "world_size", "step"):
        check(index[name] == vote[name], f"{ref['name']}: {name}")
    check(len(plan["tensors"]) == len(index["chunks"]) == vote["tensors"], "number of tensors")
    index["tensors"] = [[*part, chunks] for part, chunks in zip(plan["tensors"], index["chunks"], strict=True)]
    chunks = [chunk for tensor in index["tensors"] for chunk in tensor[5]]
    check(sum(c[3] for c in chunks) == vote["raw_bytes"], "raw bytes")
    check(sum(c[2] for c in chunks) == vote["stored_bytes"], "stored bytes")
    for item in index["objects"]:
        check(re.fullmatch(rf"{vote['rank']:05d}-\d+\.(chunks|file)", item["name"]) is not None, item["name"])
        check(object_path(folder, item).stat().st_size == item["size"], item["name"])
    older = sorted({f"{item['held_by']}/{item['name']}" for item in index["objects"] if "held_by" in item})
    check(older == vote.get("refers", []), "refers")
    return index


def object_path(folder: Path, item: dict[str, Any]) -> Path:
    """Of an object of this attempt, or of the older one that holds it."""
    if "held_by" not in item:
        return Path(folder / group(item["name"]) / item["name"])
    check(re.fullmatch(r"[^/.\\][^/\\]*/\d{8,}-\d+", item["held_by"]) is not None, item["held_by"])
    return Path(folder.parents[1] / item["held_by"] / group(item["name"]) / item["name"])


def group(name: str) -> str:
    """The directory in an attempt that holds the objects of the rank in `name`."""
    number = int(name.split("-")[0].split(".")[0]) // 256
    return str(number) if number else ""


def plan_of(data: bytes, vote: dict[str, Any]) -> dict[str, Any]:
    """The plan with which an index begins."""
    ref = vote["index"]["plan"]
    packed = data[: ref["size"]]
    check(digest(packed) == ref["digest"], "plan")
    plan: dict[str, Any] = msgspec.msgpack.decode(packed)
    check((plan["format"], plan["version"]) == ("checkpointd.plan", 3), "plan")
    check((plan["rank"], plan["world_size"]) == (vote["rank"], vote["world_size"]), "plan")
    return plan


# --- the joint plan ----------------------------------------------------------------------------------------------------


def joint_plan(root: Path, tag: str) -> tuple[dict[str, list[list[int]]], list[int], list[str]]:
    """Of each global tensor its boxes, as rows of rank, offsets and sizes; the twins; the own values that differ."""
    folder, commit = checkpoint(root, tag)
    data = (folder / f"plan-{commit['plan']['digest']}").read_bytes()
    check(commit["plan"] == {"digest": digest(data), "size": len(data)}, "joint plan")
    plan = msgspec.msgpack.decode(data)
    ranks = commit["world_size"]
    check((plan["format"], plan["version"], plan["world_size"]) == ("checkpointd.joint-plan", 3, ranks), "joint plan")
    names = msgspec.msgpack.decode(frame(plan["names"], plan["names_nbytes"]))
    boxes: dict[str, list[list[int]]] = {}
    at = 0
    for tensors, nbytes, packed in plan["blocks"]:
        numbers = np.frombuffer(frame(packed, nbytes), "<i8")
        for fqn, _, shape, count in names[at : at + tensors]:
            width = 1 + 2 * len(shape)
            boxes[fqn] = np.cumsum(numbers[: width * count].reshape(width, count), axis=1).T.tolist()
            numbers = numbers[width * count :]
        at += tensors
    check(at == len(names) and list(boxes) == sorted(boxes), "joint plan: names")
    twins = np.cumsum(np.frombuffer(frame(plan["twins"], 8 * ranks), "<i8")).tolist()
    check(all(twins[twin] == twin <= rank for rank, twin in enumerate(twins)), "joint plan: twins")
    return boxes, twins, plan["differing"]


def frame(data: bytes, nbytes: int) -> bytes:
    found: bytes = zstandard.ZstdDecompressor().decompress(data)
    check(zstandard.frame_content_size(data) == nbytes == len(found), "frame")
    return found


# --- tensors -----------------------------------------------------------------------------------------------------------


def unpacked(stored: bytes, codec: str, raw_size: int) -> bytes:
    if codec == "raw":
        return stored
    if codec == "zstd":
        return zstandard.ZstdDecompressor().decompress(stored)
    check(codec == "planes", codec)
    version, width, rotation, reserved, size = struct.unpack_from("<BBBBQ", stored)
    check((version, reserved, size) == (1, 0, raw_size), "frame")
    count, position = size // width, 12 + 9 * width
    planes = {}
    for plane in reversed(range(width)):
        method, length = struct.unpack_from("<BQ", stored, 12 + 9 * (width - 1 - plane))
        body = stored[position : position + length]
        planes[plane] = zstandard.decompress(body) if method == 1 and count else body
        position += length
    words = [sum(planes[i][k] << 8 * i for i in range(width)) for k in range(count)]
    top = 8 * width - 1
    turned = [(word >> 1 | (word & 1) << top) if rotation else word for word in words]
    return b"".join(word.to_bytes(width, "little") for word in turned) + stored[position:]


def undelta(stored: bytes, raw_size: int, base: bytes) -> bytes:
    made, width = unpacked(stored, "planes", raw_size), stored[1]
    count, top = raw_size // width, 1 << 8 * width
    out = []
    for k in range(count):
        z = int.from_bytes(made[k * width : (k + 1) * width], "little")
        before = int.from_bytes(base[k * width : (k + 1) * width], "little")
        out.append(((before - (z + 1) // 2 if z % 2 else before + z // 2) % top).to_bytes(width, "little"))
    return b"".join(out) + made[count * width :]


def chunk_bytes(folder: Path, index: dict[str, Any], chunk: list[Any], fqn: str, base: bytes = b"") -> bytes:
    number, offset, stored, raw, codec, checksum, raw_digest = chunk[:7]
    with open(object_path(folder, index["objects"][number]), "rb") as file:
        file.seek(offset)
        data = file.read(stored)
    check(checksum == (None if codec == "raw" else xxhash.xxh3_64_intdigest(data)), f"{fqn}: checksum")
    found = undelta(data, raw, base) if codec == "delta" else unpacked(data, codec, raw)
    check(xxhash.xxh3_128_digest(found) == raw_digest, f"{fqn}: digest")
    return found


def tensor_bytes(folder: Path, index: dict[str, Any], entry: list[Any]) -> bytes:
    fqn, dtype, shape, (offsets, sizes), scope, chunks = entry
    check((sizes, set(offsets) <= {0}, scope in ("rank", "global")) == (shape, True, True), f"{fqn} is not whole")
    parts = []
    for chunk in chunks:
        raw, codec, base = chunk[3], chunk[4], chunk[7] if len(chunk) > 7 else None
        check((codec == "delta") == (base is not None), f"{fqn}: base")
        before = b""
        if base is not None:
            number, offset, stored, base_codec, checksum, base_digest = base
            check(base_codec != "delta" and "held_by" in index["objects"][number], f"{fqn}: base")
            before = chunk_bytes(folder, index, [number, offset, stored, raw, base_codec, checksum, base_digest], fqn)
        parts.append(chunk_bytes(folder, index, chunk, fqn, before))
    whole = b"".join(parts)
    check(len(whole) == int(np.prod(shape)) * ITEM_BYTES[dtype], f"{fqn}: size")
    return whole


def tensors_of(folder: Path, index: dict[str, Any]) -> dict[str, tuple[str, list[int], bytes]]:
    """FQN -> dtype, shape, bytes; aliases included."""
    found = {entry[0]: (entry[1], entry[2], tensor_bytes(folder, index, entry)) for entry in index["tensors"]}
    for fqn, owner, shape, stride, offset in index["aliases"]:
        dtype, _, data = found[owner]
        items = np.frombuffer(data, dtype=f"V{ITEM_BYTES[dtype]}")
        strides = [step * items.itemsize for step in stride]
        view = np.lib.stride_tricks.as_strided(items[offset:], shape, strides)
        found[fqn] = (dtype, shape, view.tobytes())
    return found


# --- files -------------------------------------------------------------------------------------------------------------


def files(root: Path, tag: str) -> dict[str, bytes]:
    """The files of a checkpoint by name, as objects and as their indexes describe them."""
    found: dict[str, bytes] = {}
    for rank in range(checkpoint(root, tag)[1]["world_size"]):
        folder, index = index_of(root, tag, rank)
        vote = vote_of(folder, checkpoint(root, tag)[1], rank)
        kind, at, described_files = msgspec.msgpack.decode(index["tree"])
        check((kind, at, [file[0] for file in described_files]) == ("F", vote["shown_at"], vote["files"]), "files")
        tensors = {fqn: data for fqn, (_, _, data) in tensors_of(folder, index).items()}
        for item, file in zip(index["objects"], described_files, strict=True):
            data = object_path(folder, item).read_bytes()
            check(data == described_file(file, tensors), file[0])
            found[file[0]] = data
    return found


def described_file(file: list[Any], tensors: dict[str, bytes]) -> bytes:
    name, size, hollow, placeholders, sums = file
    whole, around = b"", tensors[hollow]
    for start, fqn in sorted(placeholders, key=lambda placeholder: placeholder[0]):
        gap = start - len(whole)
        whole, around = whole + around[:gap] + tensors[fqn], around[gap:]
    whole += around
    check(len(whole) == size, f"{name}: size")
    for placeholder, start in sums:
        check(
            whole[start : start + 4] == zlib.crc32(tensors[placeholders[placeholder][1]]).to_bytes(4, "little"), f"{name}: sums"
        )
    return whole


# --- the state tree ----------------------------------------------------------------------------------------------------


def described(node: Any, tensors: dict[str, tuple[str, list[int], bytes]]) -> Any:
    if node is None or isinstance(node, bool | int | str):
        return node
    if isinstance(node, float):
        return {"float": struct.pack("<d", node).hex()}
    kind, *rest = node
    if kind in ("T", "P"):
        dtype, shape, data = tensors[rest[0]]
        return {"tensor": dtype, "shape": shape, "requires_grad": rest[1], "hex": data.hex()}
    if kind == "W":
        inner = [[name, described(part, tensors)] for name, part in rest[3]]
        facts = {"dtype": rest[2], "shape": rest[1], "requires_grad": rest[5], "inner": sorted(inner)}
        return {"composite": rest[0], **facts, "context": described(rest[4], tensors)}
    if kind == "O":
        return {"named": rest[0], "items": [[name, described(item, tensors)] for name, item in rest[1]]}
    if kind == "A":
        dtype, shape, data = tensors[rest[0]]
        as_bytes = dtype == "uint8" and rest[1] != "|u1"
        return {"array": rest[1], "shape": shape[:-1] if as_bytes else shape, "hex": data.hex()}
    if kind == "E":
        return {"member": f"{rest[0]}.{rest[1]}", "name": rest[2], "value": described(rest[3], tensors)}
    if kind == "Q":
        return {"deque": [described(item, tensors) for item in rest[1]], "maxlen": rest[2]}
    if kind == "U":
        items = [[name, described(item, tensors)] for name, item in zip(rest[4], rest[1], strict=True)]
        return {"namedtuple": f"{rest[2]}.{rest[3]}", "items": items}
    if kind == "V":
        return {"library": rest[0], "parts": [described(part, tensors) for part in rest[1]]}
    if kind == "D":
        items = [[described(k, tensors), described(v, tensors)] for k, v in rest[1]]
        carried = {} if rest[2] is None else {"attributes": described(rest[2], tensors)}
        return {"mapping": rest[0], "items": items, **carried}
    if kind == "L":
        items = [described(item, tensors) for item in rest[1]]
        return {"sequence": rest[0], "items": sorted(items, key=json.dumps) if rest[0] in ("set", "frozenset") else items}
    return scalar(kind, rest)


def scalar(kind: str, rest: list[Any]) -> Any:
    if kind == "N":
        return {"scalar": rest[0], "hex": rest[1].hex()}
    if kind == "B":
        return {"bytes": rest[0].hex()}
    if kind == "I":
        return {"int": hex(int(rest[0], 16))}
    if kind == "C":
        return {"complex": struct.pack("<dd", *rest).hex()}
    check(kind == "Y", kind)
    return {"torch": rest[0], "name": rest[1]}


def read(root: Path, tag: str, rank: int) -> Any:
    """What `rank` saved under `tag`: `state` and `client_state`, described."""
    folder, index = index_of(root, tag, rank)
    tree = msgspec.msgpack.decode(index["tree"])
    found = described(tree, tensors_of(folder, index))
    return dict(found["items"])
