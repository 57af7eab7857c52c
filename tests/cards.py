"""A card and a core for each worker of pytest-xdist: `pytest -p cards -n N` gives worker i card i mod their number.

Loaded by -p, before anything imports PyTorch or JAX, which look for cards once.  What starts several ranks gives them
all cards: `all_cards`.
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


def pytest_collection_modifyitems(items):
    """What starts several ranks waits for cards, so it comes first; other workers take the rest."""
    items.sort(key=lambda item: item.get_closest_marker("ranks") is None)
