"""If one rank refuses a call with a sharded vocabulary, all do: none waits for a rank that has raised.

Ranks check their arguments, which may differ, before they exchange anything.  On the CPU, and with check_inputs, each
then tells the others whether it goes on: in `go_on_together` if it does, and in `refused_together`, with the reason, if
it has raised.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Their names from PyTorch 2.13 on, and before.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# The bytes that a reason may have.
_SIZE = 1024


class _Ranks(NamedTuple):
    """The ranks that share a vocabulary, and the device of what they exchange."""

    group: ProcessGroup
    device: torch.device


class _Waiting(threading.local):
    """The ranks that wait to hear about this thread's call; None if none do."""

    ranks: _Ranks | None = None


_WAITING = _Waiting()


@contextmanager
def refused_together(check_inputs: Any) -> Iterator[None]:
    """A context for a public function: if it raises for its arguments, the ranks that share its vocabulary are told."""
    before, _WAITING.ranks = _WAITING.ranks, None
    try:
        yield
    except Exception as error:
        ranks = _waiting()
        if ranks is not None and (ranks.device.type == "cpu" or check_inputs is True):
            _refuse(ranks, error)
        raise
    finally:
        _WAITING.ranks = before


def _waiting() -> _Ranks | None:
    return _WAITING.ranks


def others_wait(group: ProcessGroup, x: Tensor) -> None:
    """Note that the group's ranks wait to hear whether this thread's call, on the device of `x`, goes on."""
    if not torch.compiler.is_compiling() and not x.is_meta:
        _WAITING.ranks = _Ranks(group, x.device)


def go_on_together(op: str, group: ProcessGroup, device: torch.device, check: Callable[[], Any] | None) -> None:
    """Raise on every rank if `check` raises on one, or if one has refused the call before."""
    _WAITING.ranks = None
    ranks = _Ranks(group, device)
    if check is not None:
        try:
            check()
        except Exception as error:
            _refuse(ranks, error)
            raise
    for rank, reason in enumerate(_told(ranks, "")):
        if reason:
            raise ValueError(f"{op}: rank {rank} of vocab_group refused the call: {reason}")


def _refuse(ranks: _Ranks, error: Exception) -> None:
    with suppress(Exception):  # if the group has failed, the original error tells more
        _told(ranks, str(error) or type(error).__name__)


def _told(ranks: _Ranks, reason: str) -> list[str]:
    """Each rank's reason to refuse, given this rank's; "" for a rank that goes on."""
    said = torch.tensor([*reason.encode()[:_SIZE].ljust(_SIZE, b"\0")], dtype=torch.uint8, device=ranks.device)
    if type(said) is not Tensor:  # a tensor without memory, as some modes make
        return []
    out = said.new_empty(ranks.group.size(), _SIZE)
    all_gather(out.view(-1), said, group=ranks.group)
    return [bytes(x).rstrip(b"\0").decode(errors="ignore") for x in out.tolist()]
