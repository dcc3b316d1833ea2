"""A tokenizer and texts for torchtitan's debug model, made here."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = [f"word{i}" for i in range(200)]


def make_data(folder: Path) -> None:
    """A tokenizer of a few words, and a data set of texts with them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    (folder / "tokenizer").mkdir()
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "texts").mkdir()
    chosen = random.Random(7)
    texts = (" ".join(chosen.choices(WORDS, k=chosen.randint(20, 60))) for _ in range(300))
    (folder / "texts" / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
