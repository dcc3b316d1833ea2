"""The safetensors layout, read by Hugging Face's own library."""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from checkpointd.export.safetensors import DTYPES, Item, Unsupported, file_names, index_json, plan_file, split
from checkpointd.layout.dtypes import ITEM_BYTES

items = st.builds(
    Item,
    st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__"),
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
)
files = st.lists(items, max_size=8, unique_by=lambda item: item.name)
safe_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=10)


@given(files, st.dictionaries(safe_text, safe_text, max_size=3))
def test_what_is_laid_out_the_library_reads(items: list[Item], metadata: dict[str, str]) -> None:
    plan = plan_file("model.safetensors", items, metadata)
    data = np.random.default_rng(0).integers(0, 2, plan.size, dtype=np.uint8)
    data[: len(plan.header)] = np.frombuffer(plan.header, np.uint8)
    with tempfile.NamedTemporaryFile() as file:
        file.write(data.tobytes())
        file.flush()
        with safe_open(file.name, framework="pt") as opened:
            assert opened.metadata() == (metadata or None) or not metadata
            loaded = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
    assert loaded.keys() == {item.name for item in items}
    for item in items:
        tensor = loaded[item.name]
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{item.dtype}", item.shape)
        start = plan.offsets[item.name]
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == data[start : start + item.nbytes].tobytes()


@given(files)
def test_every_tensor_begins_at_a_multiple_of_its_elements(items: list[Item]) -> None:
    plan = plan_file("model.safetensors", items, {})
    assert len(plan.header) % 8 == 0
    assert all(plan.offsets[item.name] % ITEM_BYTES[item.dtype] == 0 for item in items)


def test_metadata_reaches_the_reader(tmp_path: Path) -> None:
    plan = plan_file("a", [Item("w", "float32", (2,))], {"format": "pt", "head": "w"})
    path = tmp_path / "a"
    path.write_bytes(plan.header + bytes(8))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "head": "w"}


@given(files, st.integers(1, 500))
def test_files_hold_what_was_asked_for_in_order(items: list[Item], most: int) -> None:
    parts = split(items, most)
    assert [item for part in parts for item in part] == items
    for part in parts:
        assert sum(item.nbytes for item in part) <= most or sum(item.nbytes > 0 for item in part) == 1
    for before, after in pairwise(parts):
        assert sum(item.nbytes for item in before) + after[0].nbytes > most


def test_files_are_named_as_hugging_face_names_them() -> None:
    assert file_names(1) == ["model.safetensors"]
    assert file_names(3)[1] == "model-00002-of-00003.safetensors"
    assert split([], 5) == [[]]
    assert split([Item("w", "int8", (10,))] * 2, None) == [[Item("w", "int8", (10,))] * 2]


def test_the_index_says_where_each_tensor_is() -> None:
    one, two = Item("b", "bfloat16", (3,)), Item("a", "float32", (2, 2))
    index = json.loads(index_json([("1.safetensors", [one]), ("2.safetensors", [two])]))
    assert index == {"metadata": {"total_size": 22}, "weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([Item("w", "complex128", (1,))], "w has the dtype complex128"),
        ([Item("w", "bits1x8", (1,))], "w has the dtype bits1x8"),
        ([Item("__metadata__", "int8", (1,))], "'__metadata__' cannot be the name of a tensor"),
        ([Item("w", "int8", (1,))] * 2, "'w' cannot be the name of a tensor of model"),
        ([Item("w" * 100_000_000, "int8", (1,))], "the header of model would have"),
    ],
    ids=["complex128", "bits", "metadata", "twice", "long"],
)
def test_what_the_format_cannot_hold_is_named(items: list[Item], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        plan_file("model", items, {})
