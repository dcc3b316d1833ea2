"""Ray Train: save in the background inside a training function, and report to Ray what has committed."""

from checkpointd_client.integrations.ray.checkpointer import RayCheckpointer
from checkpointd_client.integrations.ray.reference import open_reported

__all__ = ["RayCheckpointer", "open_reported"]
