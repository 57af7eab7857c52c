"""The corpus (the standard library's language reference), a tokenizer trained on it, and batches of token ids."""

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from onchip.demo import SEQUENCE

Ids = NDArray[np.int64]

HELD_OUT = 0.05
"""The fraction of the corpus, at its end, that is kept for the validation loss."""


def load_text() -> str:
    """The prose of the documentation that comes with Python (`help("topics")`), one paragraph per line."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    return "\n".join(p for p in paragraphs if p.endswith((".", ":")) and ">>>" not in p and "::=" not in p)


def train_tokenizer(text: str, vocab: int) -> Tokenizer:
    """Train a tokenizer on `text`, which takes half a second.

    It may have fewer entries than `vocab`: the trainer stops when no pair of tokens occurs twice.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> tuple[Ids, Ids]:
    """Token ids of `text`: the part to train on, and the tail that is held out."""
    ids = np.array(tokenizer.encode(text).ids, np.int64)
    cut = round(len(ids) * (1 - HELD_OUT))
    return ids[:cut], ids[cut:]


def random_batch(ids: Ids, tokens: int, rng: np.random.Generator) -> Ids:
    """Rows [tokens / SEQUENCE, SEQUENCE + 1], cut from `ids` at random places; each id but a row's first is a label."""
    places = rng.integers(len(ids) - SEQUENCE, size=(tokens // SEQUENCE, 1)) + np.arange(SEQUENCE + 1)
    return ids[places]


def batches_in_order(ids: Ids, tokens: int) -> Iterator[Ids]:
    """Such rows that go through `ids` once, at most `tokens` labels at a time; an incomplete last row is dropped."""
    starts = np.arange(0, len(ids) - SEQUENCE, SEQUENCE)[:, None]
    rows = ids[starts + np.arange(SEQUENCE + 1)]
    at_a_time = tokens // SEQUENCE
    for start in range(0, len(rows), at_a_time):
        yield rows[start : start + at_a_time]
