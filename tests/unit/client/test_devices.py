"""Accelerators, without one. `tests/accelerator` tries the rest on a simulated device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpointd_client import devices


class Runtime:
    """CUDA's runtime. It keeps the error of a call that failed until somebody asks, as torch does after each kernel."""

    def __init__(self, code: int) -> None:
        self.code, self.kept, self.kernels = code, 0, 0

    def cudaHostRegister(self, *_: int) -> int:
        self.kept = self.code
        return self.code

    cudaHostUnregister = cudaHostRegister

    def kernel(self, *_: Any, **__: Any) -> torch.Tensor:
        self.kernels += 1
        code, self.kept = self.kept, 0
        if code:
            raise RuntimeError(f"CUDA error {code}")
        return torch.empty(1)


@pytest.mark.parametrize("code", [0, 1, 712])
def test_memory_that_cannot_be_pinned_leaves_no_error_to_the_training(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """torch would raise it after the next kernel, in the middle of a step."""
    runtime = Runtime(code)
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", runtime.kernel)
    assert devices.PINNING["cuda"].register(4096, 4096) == code
    assert runtime.kept == 0
    assert devices.PINNING["cuda"].unregister(4096) == code
    assert runtime.kept == 0
    assert runtime.kernels == (2 if code else 0), "without an error nothing is launched"
