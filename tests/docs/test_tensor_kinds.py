"""The table of docs/howto/TENSOR_KINDS.md says what tensors of each kind of torch can do; here they do it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpointd.errors import MismatchError
from checkpointd_client.capture.tensor_kinds.classes import BUILT_IN
from tests.unit.client.capture_and_fill import bytes_of, save
from tests.unit.client.composite_tensors import KINDS, facts_of, made, quietly

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "TENSOR_KINDS.md"
LINES = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
ROWS = {cells[0]: cells[1:] for cells in LINES}
ROW_OF = {"sparse": "sparse: ", "jagged": "nested: ", "nested": "nested: ", "q": "quantized: "}


def row_of(kind: str) -> list[str]:
    start = next(words for prefix, words in ROW_OF.items() if kind.startswith(prefix))
    return next(cells for name, cells in ROWS.items() if name.startswith(start))


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:Sparse .* tensor support:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_can_do_what_its_row_says(kind: str) -> None:
    saves, as_plain, *_ = row_of(kind)
    tensor = made(kind)
    saved = quietly(lambda: save({"x": tensor}))
    assert saves == "yes"
    target = {"x": made(kind, 1)}
    quietly(lambda: saved.load(target))
    assert facts_of(target["x"]) == facts_of(tensor)
    plain = {"x": torch.zeros(tuple(tensor.shape) if as_plain == "yes" else (2, 3))}
    if as_plain == "yes":
        saved.load(plain, cast=True)
        dense = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
        assert bytes_of(plain["x"]) == bytes_of(dense)
    else:
        with pytest.raises(MismatchError, match="is stored, and a tensor"):
            saved.load(plain, cast=True)


def test_the_page_names_every_class_that_is_allowed_by_itself() -> None:
    text = PAGE.read_text()
    assert [name for name in BUILT_IN if f"`{name.partition(':')[2]}`" not in text] == []
