"""`onchip demo`: train a small language model twice, with the plain loss and with onchip's, and show the difference.

`run.py` is the front door; it checks the options and loads the rest: `data.py` (corpus, tokenizer, batches), `model.py`
(sizes and initial weights), `train.py` (training, measuring, sampling), `report.py` (picture, page, table).  What
depends on the framework (the Llama, losses, optimizer) is in `torch_train.py` and `jax_train.py`, of which only the
chosen framework's is loaded.
"""

PACKAGES = {"torch": ("torch", "transformers"), "jax": ("jax", "optax")}
EXTRAS = {"torch": "torch,demo", "jax": "jax,demo-jax"}
"""What to install for them."""

SEQUENCE = 128
"""Tokens in a training sequence; the tokens of a step are a multiple of it."""
MIN_VOCAB = 256
"""Byte-level BPE starts from the 256 bytes; there are no special tokens."""
MAX_VOCAB = 262_144
"""As many entries as the largest vocabularies of published models; more would only fill memory."""
