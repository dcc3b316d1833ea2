"""The facts at the head of the report: versions, the accelerator, its driver and its memory."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

import torch

from checkpointd import __version__
from checkpointd.doctor.finding import Fact
from checkpointd.phrases import byte_size
from checkpointd_client import devices

DRIVERS = ("nvidia", "amdgpu", "xe", "i915", "habanalabs")
"""Kernel modules of accelerators. Some of them have a version of their own."""


def facts(device: torch.device, clock: str) -> tuple[Fact, ...]:
    """For the report, in the order in which people ask. `clock`: how times are measured."""
    properties = _properties(device)
    found = {
        "device": f"{device.type}, {torch.accelerator.device_count()} of them: {_name(device)}",
        "device memory": byte_size(total) if (total := getattr(properties, "total_memory", 0)) else "",
        "driver": getattr(properties, "driver_version", "") or ", ".join(_drivers()),
        "runtime": ", ".join(
            f"{name} {version}" for name in ("cuda", "hip", "xpu") if (version := getattr(torch.version, name, None))
        ),
        "pins host memory": "registered" if device.type in devices.PINNING else "torch offers no call for it",
        "times by": clock,
        "torch": str(torch.__version__),
        "checkpointd": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    return tuple(Fact(name, value or "not known") for name, value in found.items())


def _properties(device: torch.device) -> object:
    with contextlib.suppress(Exception):  # a vendor's backend may raise any error
        return torch.get_device_module(device.type).get_device_properties(device)
    return None


def _name(device: torch.device) -> str:
    return str(getattr(_properties(device), "name", "") or "a device without a name")


def _drivers() -> list[str]:
    places = {name: Path("/sys/module") / name / "version" for name in DRIVERS}
    return [f"{name} {place.read_text().strip()}" for name, place in places.items() if place.is_file()]


def free_bytes(device: torch.device) -> int | None:
    """The free memory of the device; None if torch cannot tell."""
    with contextlib.suppress(Exception):
        return int(torch.get_device_module(device.type).mem_get_info(device)[0])
    return None
