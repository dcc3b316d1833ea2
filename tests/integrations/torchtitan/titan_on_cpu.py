"""Lets torchtitan train on the CPU with gloo, which it is not made for. Call `prepare` before torchtitan is imported.

What is replaced here has nothing to do with checkpoints: the device, its memory statistics, kernels for GPUs, the check that
refuses attention's backward pass on the CPU, a reduction that gloo lacks, and the step of a pipeline, which torchtitan calls
with microbatches, as nightly builds of torch allow.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
from typing import Any

import torch
import torch._utils
import torch.nn.attention.flex_attention as flex_attention
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


class _NoKernels(types.ModuleType):
    """In place of kernels that need triton, and that no debug model calls."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Properties:
    total_memory = 1 << 30


def prepare() -> None:
    """Replace them. A second call does nothing."""
    if getattr(torch.cpu, "memory_stats", None) is not None:
        return
    if importlib.util.find_spec("triton") is None:
        sys.modules[_KERNELS] = _NoKernels(_KERNELS)
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda *_: "cpu"
    cpu.get_device_properties = lambda *_: _Properties
    cpu.memory_stats = lambda *_: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
    flex_attention._validate_device = lambda *_: None
    divide = FSDPModule.set_gradient_divide_factor

    def summed(module: Any, factor: float) -> None:
        divide(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = summed  # type: ignore[method-assign]
    if "arg_mbs" not in inspect.signature(PipelineScheduleMulti.step).parameters:
        PipelineScheduleMulti.step = _pipeline_step


def _pipeline_step(schedule: Any, **given: Any) -> None:
    for stage in schedule._stages:
        stage.has_backward = schedule._has_backward
        stage.clear_runtime_states()
    schedule._step_microbatches(**given)
