"""A card and a core for each worker of pytest-xdist: `pytest -p cards -n N` gives worker i the card i mod their number.

-p loads it before anything imports PyTorch or JAX, which look for cards only once.  Tests that start several ranks give
them all cards: `all_cards`.
"""

import os
from pathlib import Path

cards = sorted(int(x.name.removeprefix("nvidia")) for x in Path("/dev").glob("nvidia[0-9]*"))
worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if len(cards) > 1 and worker and "CUDA_VISIBLE_DEVICES" not in os.environ:
    os.environ["EVERY_CARD"] = ",".join(map(str, cards))
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(worker.removeprefix("gw")) % len(cards))
if worker:  # Threads of as many as there are cores, in every worker, wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else processes of their own


def pytest_collection_modifyitems(items):
    """What starts several ranks waits for cards, so it comes first; other workers take the rest."""
    items.sort(key=lambda item: item.get_closest_marker("ranks") is None)
