"""What DATA_LOADERS takes for granted: a dataset, a model with its optimizer, and a step that takes a batch."""

from tests.docs.before.training import data, model, optimizer

__all__ = ["dataset", "model", "optimizer", "train_one_step"]

dataset = data


def train_one_step(batch: object) -> None: ...
