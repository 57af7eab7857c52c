"""The corpus (the standard library's language reference), a tokenizer trained on it, and batches of token ids."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from onchip.demo import SEQUENCE

Ids = NDArray[np.int64]

HELD_OUT = 0.05
"""The last part of the corpus that is kept for the validation loss."""


def load_text() -> str:
    """About 465,000 characters of English that come with every Python: `help("topics")`."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def train_tokenizer(text: str, vocab: int) -> Tokenizer:
    """The tokenizer for `text`, in half a second.

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


def random_batch(ids: Ids, tokens: int, rng: np.random.Generator) -> tuple[Ids, Ids]:
    """Inputs and targets [tokens / SEQUENCE, SEQUENCE], cut from `ids` at random places."""
    places = rng.integers(len(ids) - SEQUENCE, size=(tokens // SEQUENCE, 1)) + np.arange(SEQUENCE)
    return ids[places], ids[places + 1]


def batches_in_order(ids: Ids, tokens: int) -> Iterator[tuple[Ids, Ids]]:
    """Inputs and targets that walk through all of `ids` once, at most `tokens` at a time; a last part is dropped."""
    whole = (len(ids) - 1) // SEQUENCE * SEQUENCE
    inputs = ids[:whole].reshape(-1, SEQUENCE)
    targets = ids[1 : whole + 1].reshape(-1, SEQUENCE)
    rows = tokens // SEQUENCE
    for start in range(0, len(inputs), rows):
        yield inputs[start : start + rows], targets[start : start + rows]
