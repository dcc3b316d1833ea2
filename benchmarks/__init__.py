"""The benchmark: checkpointd beside torch.save, torch.distributed.checkpoint and torch-checkpointing."""
