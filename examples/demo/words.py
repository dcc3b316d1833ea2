"""A small tokenizer that is made on the spot: the most frequent words of a text, and bytes for all else. Nothing is lost."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

_WORD = re.compile(rb"[A-Za-z_]+|\s+|.", re.DOTALL)
_BYTES = 256


class WordTokenizer:
    """Token 0 to 255 is a byte; each further one is a word. Its methods are called as those of transformers' tokenizers."""

    def __init__(self, words: list[bytes]) -> None:
        self.words = words
        self._tokens = {word: _BYTES + number for number, word in enumerate(words)}

    @classmethod
    def train(cls, text: bytes, *, vocabulary: int) -> WordTokenizer:
        """The tokenizer of `vocabulary` tokens whose words are the most frequent ones of `text`."""
        counts = Counter(word for word in _WORD.findall(text) if len(word) > 1)
        words = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(words[: vocabulary - _BYTES])

    def __len__(self) -> int:
        return _BYTES + len(self.words)

    def encode(self, text: str) -> list[int]:
        found: list[int] = []
        for word in _WORD.findall(text.encode()):
            token = self._tokens.get(word)
            found += list(word) if token is None else [token]
        return found

    def decode(self, tokens: list[int]) -> str:
        parts = [bytes([token]) if token < _BYTES else self.words[token - _BYTES] for token in tokens]
        return b"".join(parts).decode(errors="replace")

    def save_pretrained(self, directory: str | Path) -> None:
        """Write it to the directory, which is made where it is missing."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        content = {"kind": "words and bytes", "words": [word.decode("latin-1") for word in self.words]}
        (folder / "tokenizer.json").write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> WordTokenizer:
        content = json.loads((Path(directory) / "tokenizer.json").read_text())
        return cls([word.encode("latin-1") for word in content["words"]])
