"""Sparse tensors in all layouts of torch."""

from __future__ import annotations

from typing import Any

import torch

from checkpointd_client.capture.tensor_kinds.kind import Apart, Inner, OuterFacts, TensorKind, swap


class SparseCoo(TensorKind):
    """Indices and values. An uncoalesced tensor stays one: its duplicates keep their order."""

    name = "sparse_coo"
    names = needed = frozenset({"indices", "values"})

    def apart(self, tensor: torch.Tensor) -> Apart:
        plain = tensor.detach()
        return Apart({"indices": plain._indices(), "values": plain._values()}, {"is_coalesced": tensor.is_coalesced()})

    def made(self, facts: OuterFacts, inner: Inner, context: Any) -> torch.Tensor:
        return torch.sparse_coo_tensor(
            inner["indices"],
            inner["values"],
            facts.shape,
            is_coalesced=bool(context["is_coalesced"]),
            requires_grad=facts.requires_grad,
            check_invariants=True,
        )

    def refill(self, live: torch.Tensor, made: torch.Tensor) -> None:
        live.data = made  # copy_() refuses another number of sparse dimensions

    def check(self, facts: OuterFacts, inner: Inner, context: Any) -> None:
        torch._validate_sparse_coo_tensor_args(inner["indices"], inner["values"], facts.shape, bool(context["is_coalesced"]))


class SparseCompressed(TensorKind):
    """A compressed layout: pointers to the rows (or columns), indices of the other dimension, and values."""

    def __init__(self, name: str) -> None:
        self.name, self.layout = name, getattr(torch, name)
        by_rows = name in ("sparse_csr", "sparse_bsr")
        self._pointers, self._indices = ("crow_indices", "col_indices") if by_rows else ("ccol_indices", "row_indices")
        self.names = self.needed = frozenset({self._pointers, self._indices, "values"})

    def apart(self, tensor: torch.Tensor) -> Apart:
        plain = tensor.detach()
        return Apart({name: getattr(plain, name)() for name in (self._pointers, self._indices, "values")})

    def made(self, facts: OuterFacts, inner: Inner, context: Any) -> torch.Tensor:
        return torch.sparse_compressed_tensor(
            inner[self._pointers],
            inner[self._indices],
            inner["values"],
            facts.shape,
            layout=self.layout,
            requires_grad=facts.requires_grad,
            check_invariants=True,
        )

    def refill(self, live: torch.Tensor, made: torch.Tensor) -> None:
        if self._index_dtype(live) == self._index_dtype(made):
            live.resize_as_sparse_(made)
            live.copy_(made)
        else:
            swap(live, made)

    def _index_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        indices: torch.Tensor = getattr(tensor.detach(), self._indices)()
        return indices.dtype

    def check(self, facts: OuterFacts, inner: Inner, context: Any) -> None:
        torch._validate_sparse_compressed_tensor_args(
            inner[self._pointers], inner[self._indices], inner["values"], facts.shape, self.layout
        )
