"""Forged roots, as made by an attacker who may write there: after each change, all digests are computed anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from checkpointd.layout.manifest import digest

Fields = dict[str, Any]


def sealed(fields: Mapping[str, Any] | bytes) -> bytes:
    """A small object of these fields (or of this JSON text, up to its closing brace) under a checksum that fits."""
    text = fields if isinstance(fields, bytes) else msgspec.json.format(msgspec.json.encode(dict(fields)), indent=2)[:-2]
    body = text + b',\n  "checksum": "'
    return body + digest(body + b"0" * 32 + b'"\n}\n').encode() + b'"\n}\n'


def opened(data: bytes) -> Fields:
    """The fields of a small object, without its checksum."""
    fields: Fields = msgspec.json.decode(data)
    del fields["checksum"]
    return fields


def edited(data: bytes, **changes: Any) -> bytes:
    """The small object in `data` with some keys changed or added, under a checksum of its own."""
    return sealed(opened(data) | changes)


def chunk_of(stored: bytes, raw: bytes, /, *, offset: int = 0, codec: str = "raw", **changes: Any) -> list[Any]:
    """A chunk of an index, whose digests fit its bytes, with fields changed by name."""
    names = ("object", "offset", "stored", "raw", "codec", "checksum", "digest")
    checksum = None if codec == "raw" else xxhash.xxh3_64_intdigest(stored)
    fitting = (0, offset, len(stored), len(raw), codec, checksum, xxhash.xxh3_128_digest(raw))
    return [changes.get(name, value) for name, value in zip(names, fitting, strict=True)]


@dataclass(frozen=True)
class Forger:
    """Changes the one attempt of `tag` below `root`, of one rank, and makes all digests fit again."""

    root: Path
    tag: str

    @property
    def folder(self) -> Path:
        [attempt] = (self.root / self.tag).iterdir()
        return attempt

    @property
    def chunks(self) -> Path:
        return next(self.folder.glob("*.chunks"))

    def index(self) -> Fields:
        """The fields of both parts of the index, with the chunks of each tensor behind its box."""
        plan, found = map(msgspec.msgpack.decode, self.parts())
        chunks = found.pop("chunks")
        return {**found, "tensors": [[*part, several] for part, several in zip(plan["tensors"], chunks, strict=True)]}

    def parts(self) -> tuple[bytes, bytes]:
        """The bytes of the plan with which the index begins, and those behind it."""
        data = (self.folder / "00000.index").read_bytes()
        size = opened((self.folder / "00000.vote").read_bytes())["index"]["plan"]["size"]
        return data[:size], data[size:]

    def put_parts(self, plan: bytes, content: bytes) -> None:
        data = plan + content
        (self.folder / "00000.index").write_bytes(data)
        ref = {"size": len(plan), "digest": digest(plan)}
        self.edit_vote(index={"name": "00000.index", "size": len(data), "digest": digest(data), "plan": ref})

    def put_index(self, fields: Mapping[str, Any]) -> None:
        """An index of the fields that `index` gives."""
        content = dict(fields)
        tensors = content.pop("tensors")
        plan = {name: content[name] for name in ("version", "rank", "world_size")}
        plan |= {"format": "checkpointd.plan", "tensors": [part for *part, _ in tensors]}
        content["chunks"] = [chunks for *_, chunks in tensors]
        self.put_parts(msgspec.msgpack.encode(plan), msgspec.msgpack.encode(content))

    def edit_index(self, **changes: Any) -> None:
        self.put_index(self.index() | changes)

    def put_chunks(self, stored: bytes, tensors: list[Any], **changes: Any) -> None:
        """Other chunks, and the tensors that lie in them; the object's size as it is, unless `objects` are given."""
        self.chunks.write_bytes(stored)
        objects = [{"name": self.chunks.name, "size": len(stored)}]
        self.edit_index(**{"objects": objects, "tensors": tensors, "aliases": [], **changes})
        self.edit_vote(objects=objects)

    def put_vote(self, data: bytes) -> None:
        (self.folder / "00000.vote").write_bytes(data)
        self.put_ballot([(data, len(data))], data)

    @property
    def entry(self) -> Path:
        """The entry of the log that commits the attempt."""
        attempt = f"{self.tag}/{self.folder.name}"

        def commits(path: Path) -> bool:
            records = opened(path.read_bytes())["records"]
            return ("commit", attempt) in [(record["kind"], record.get("attempt")) for record in records]

        return next(filter(commits, sorted(self.root.glob("log/*.json"))))

    def put_ballot(self, votes: list[tuple[bytes, int]], tail: bytes) -> None:
        """A ballot whose table says that there are `votes` of these sizes, and then the bytes `tail`."""
        table = b"".join(xxhash.xxh3_128_digest(data) + size.to_bytes(8, "little") for data, size in votes)
        (self.folder / f"ballot-{digest(table)}").write_bytes(table + tail)
        self.edit_commit(ballot={"digest": digest(table), "size": len(table) + len(tail)})

    def fill_ballot(self, size: int) -> None:
        """A ballot of `size` bytes, all of them 0, which the commit names with another digest."""
        self.sparse(f"ballot-{'0' * 32}", size)
        self.edit_commit(ballot={"digest": "0" * 32, "size": size})

    def edit_vote(self, **changes: Any) -> None:
        self.put_vote(edited((self.folder / "00000.vote").read_bytes(), **changes))

    def edit_commit(self, **changes: Any) -> None:
        """Change the record of the commit in its entry."""
        fields = opened(self.entry.read_bytes())
        records = [one | changes if one["kind"] == "commit" else one for one in fields["records"]]
        self.entry.write_bytes(sealed(fields | {"records": records}))

    def cut_log(self) -> None:
        """Let the log end before the commit, and before the coordinator had counted the votes."""
        first = self.entry.name
        for ballot in self.folder.glob("ballot-*"):
            ballot.unlink()
        for path in self.root.glob("log/*.json"):
            if path.name >= first:
                path.unlink()

    def sparse(self, name: str, size: int, head: bytes = b"") -> None:
        """An object of the attempt (or a path from the root, with a slash) that declares `size` bytes and holds a few."""
        path = self.root / name if "/" in name else self.folder / name
        path.unlink(missing_ok=True)
        with open(path, "wb") as file:
            file.write(head)
            file.truncate(size)
