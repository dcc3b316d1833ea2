"""Which engines layout="checkpointd" refuses, by stand-ins: only what is looked at is there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install '.[deepspeed]'")

from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from checkpointd.errors import UsageError
from checkpointd_client.integrations.deepspeed import attach, zero_optimizer
from checkpointd_client.integrations.deepspeed.zero_optimizer import check_supported
from checkpointd_client.sharding.dtensor import ReplicaGroup

RANKS = 4


@pytest.fixture(autouse=True)
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: RANKS)
    monkeypatch.setattr(zero_optimizer, "group_of", lambda group: group)


def engine(**parts: Any) -> SimpleNamespace:
    usual = {
        "module": object(),
        "optimizer": SimpleNamespace(),
        "has_moe_layers": False,
        "seq_data_parallel_group": ReplicaGroup(0, RANKS),
        "checkpoint_engine": object(),
        "config": {},
        "zero_nvme_offload_optimizer": lambda: False,
        "curriculum_learning_enabled": lambda: False,
        "random_ltd_enabled": lambda: False,
    }
    return SimpleNamespace(**{**usual, **parts})


def stage_3(*counts: int) -> Any:
    """The optimizer of stage 3, whose sub-groups are each partitioned over so many ranks."""
    made = DeepSpeedZeroOptimizer_Stage3.__new__(DeepSpeedZeroOptimizer_Stage3)
    made.swap_optimizer = made.params_in_nvme_and_cpu = False
    made.sub_group_partition_counts = list(counts)
    return made


def test_what_is_not_refused() -> None:
    check_supported(engine())
    check_supported(engine(optimizer=stage_3(RANKS, RANKS)))
    check_supported(engine(optimizer=None))
    check_supported(engine(optimizer=SimpleNamespace(zenflow=True)))
    check_supported(engine(optimizer=SimpleNamespace(superoffload_cpu_optimizer=object())))


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"module": PipelineModule.__new__(PipelineModule)}, "is a pipeline"),
        ({"has_moe_layers": True}, "mixture-of-experts"),
        ({"seq_data_parallel_group": ReplicaGroup(0, RANKS // 2)}, "model-parallel"),
        ({"curriculum_learning_enabled": lambda: True}, "data sampler"),
        ({"random_ltd_enabled": lambda: True}, "random-LTD"),
        ({"optimizer": SimpleNamespace(swap_optimizer=True)}, "swapped to NVMe"),
        ({"optimizer": SimpleNamespace(params_in_nvme_and_cpu=True)}, "swapped to NVMe"),
        ({"optimizer": stage_3(RANKS, RANKS // 2)}, "MiCS"),
    ],
)
def test_what_has_no_name_for_all_it_keeps_is_refused_with_the_reason(parts: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=f"cannot store this engine: .*{why}.*layout='deepspeed' can"):
        check_supported(engine(**parts))


@pytest.mark.parametrize("layout", ["deepspeed", "checkpointd"])
def test_an_optimizer_on_nvme_is_refused_by_both_layouts(layout: Any) -> None:
    with pytest.raises(UsageError, match="copies NVMe-offloaded optimizer states by itself"):
        attach(engine(zero_nvme_offload_optimizer=lambda: True, save_checkpoint=None, checkpoint_engine=None), layout=layout)
