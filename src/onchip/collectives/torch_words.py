"""What ranks tell each other through their group's store, on the host, in order to map each other's memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from onchip.collectives.torch_ring import ProcessRing, process_group

_DIST: Any = dist
_C10D: Any = distributed_c10d
_Store: Any = _DIST.Store
# How often a group of this name asked for a store, for each purpose.
_COUNTS: dict[str, int] = {}


class OwnNumbers(_Store):  # type: ignore[misc]
    """A store in which the exchanges of one rendezvous are counted from 0.

    PyTorch numbers exchanges over all groups of a process, and names them by the number: ranks that are in other groups
    too would wait for each other under different names.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._first: int | None = None

    def _named(self, key: str) -> str:
        before, number, rank = key.rsplit("/", 2)
        if self._first is None:
            self._first = int(number)
        return f"{before}/{int(number) - self._first}/{rank}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._named(key), value)

    def get(self, key: str) -> Any:
        return self._store.get(self._named(key))

    def wait(self, keys: Sequence[str], *timeout: Any) -> None:
        self._store.wait([self._named(key) for key in keys], *timeout)


def named_store(ring: ProcessRing, what: str) -> tuple[str, Any]:
    """A name that all ranks of the group share, unlike other groups and earlier calls, and a store for it."""
    group = process_group(ring.group)
    name = f"onchip/{ring.group}/{'.'.join(map(str, dist.get_process_group_ranks(group)))}/{what}"
    count = _COUNTS[name] = _COUNTS.get(name, 0) + 1
    name = f"{name}/{count}"
    return name, _DIST.PrefixStore(name, _C10D._get_process_group_store(group))


@contextmanager
def registered(name: str, store: Any, ring: ProcessRing) -> Iterator[None]:
    """A group of this name, that has the store, while memory is mapped."""
    numbered = OwnNumbers(store)  # which C++ calls, but doesn't keep
    group = _DIST.ProcessGroup(numbered, ring.rank, ring.ranks)
    _C10D._register_process_group(name, group)
    try:
        yield
    finally:
        _C10D._unregister_process_group(name)
        del group, numbered


def heard(ring: ProcessRing, said: str) -> list[str]:
    """Each rank's message; every rank waits for all."""
    _, store = named_store(ring, "word")
    store.set(str(ring.rank), said)
    return [store.get(str(rank)).decode() for rank in range(ring.ranks)]
