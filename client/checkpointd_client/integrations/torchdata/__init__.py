"""Data loaders whose position means the same on any number of ranks and workers."""

from checkpointd_client.integrations.torchdata.resharding import ReshardingLoader, ReshardingSampler

__all__ = ["ReshardingLoader", "ReshardingSampler"]
