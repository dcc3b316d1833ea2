"""What RAY takes for granted: a model with its optimizer, and a step that returns the loss."""

import torch

from tests.docs.before.training import model, optimizer

__all__ = ["model", "optimizer", "train_one_step"]


def train_one_step() -> torch.Tensor:
    """A step, as any loop has it."""
    return model(torch.randn(4, 8)).square().mean()
