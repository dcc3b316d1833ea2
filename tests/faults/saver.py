"""A trainer that saves after every step as fast as it can, until it is killed: its root, its tag if it has one, its sidecar."""

from __future__ import annotations

import itertools
import sys

import torch

from checkpointd_client import Checkpointer, Retention

root, tag, sidecar = sys.argv[1], sys.argv[2] or None, sys.argv[3] or None
rules = None if tag else Retention(keep_last=3)
weights = torch.zeros(64 * 1024)
state = {"weights": weights}
ckpt = Checkpointer(root, retention=rules, sidecar=sidecar)
loaded = ckpt.load(state)
for step in itertools.count(loaded.step + 1 if loaded else 0):
    weights.copy_(torch.randn(weights.shape))
    ckpt.save(step, state, tag=tag)
