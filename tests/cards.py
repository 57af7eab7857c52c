"""A card and a core for each worker of pytest-xdist: `pytest -p cards -n N` gives worker i card i mod their number.

Loaded by -p, before anything imports PyTorch or JAX, which look for cards once.
"""

import os
from pathlib import Path

# In the environment of a worker that was given a card, and of the processes that its tests start on all of them.
GIVEN = "ONE_OF_SEVERAL_CARDS"
cards = sorted(int(x.name.removeprefix("nvidia")) for x in Path("/dev").glob("nvidia[0-9]*"))
worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if len(cards) > 1 and worker and not {"CUDA_VISIBLE_DEVICES", GIVEN} & set(os.environ):
    os.environ[GIVEN] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(worker.removeprefix("gw")) % len(cards))
if worker:  # Threads of as many as there are cores, in every worker, wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
