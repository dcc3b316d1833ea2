"""A small byte-level GPT: pre-norm blocks, causal attention, tied input and output embeddings, dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # one token per byte value
HEAD = 64  # the width of one attention head


class Attention(nn.Module):
    """Causal self-attention over `[batch, length, width]`.

    The rows of `qkv` go head by head, and the number of heads is nowhere written down: with some of the rows it computes some
    of the heads, which is what tensor parallelism needs.
    """

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, -1, 3, HEAD).transpose(1, 2).unbind(3)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        projected: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return projected


class Block(nn.Module):
    """Attention, then a four times wider MLP, each on a residual stream."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, dropout), nn.Dropout(dropout))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        mixed: Tensor = x + self.mlp(x)
        return mixed


class GPT(nn.Module):
    """Predicts the next token, a byte by default: int64 `[batch, length]` -> logits `[batch, length, vocabulary]`."""

    def __init__(self, *, layers: int, width: int, length: int, dropout: float = 0.1, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        if width % HEAD:
            raise ValueError(f"width must be a multiple of {HEAD} (the size of a head), not {width}")
        self.heads = width // HEAD
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_small_weights)
        self.head.weight = self.tokens.weight  # tied: one parameter under two names

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        logits: Tensor = self.head(self.norm(self.blocks(h)))
        return logits


def _small_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
