"""What ranks that share a vocabulary tell each other, and what that takes.  No framework.

Nothing was measured here: a rate is 80% of what the data sheet gives in one direction, about what NCCL reaches with
large messages, and each exchange takes 10 microseconds beside.
"""

from collections.abc import Mapping

import msgspec

# GB/s that a GPU sends at most while it receives as much, by data sheet: NVLink within a host, or else PCIe.
LINKS: Mapping[str, tuple[str, float]] = {
    "h100": ("NVLink", 450.0),
    "h200": ("NVLink", 450.0),
    "a100": ("NVLink", 300.0),
    "l40s": ("PCIe", 32.0),
    "4090": ("PCIe", 32.0),
    "b200": ("NVLink", 900.0),
}
_REACHED = 0.8
_START_MS = 0.01


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """What a call sends between ranks at one place."""

    name: str
    """What is exchanged."""
    kind: str
    """The collective: "all-gather", "all-reduce" or "reduce-scatter"."""
    bytes: int
    """What each rank sends, and receives."""
    ms: float
    """Predicted time."""
    hidden_under: str | None
    """What is computed meanwhile; None: nothing."""
    exposed_ms: float
    """What of the time remains beside that."""


def link_rate(gpu: str, rate: float | None) -> float:
    """GB/s that a rank reaches: the caller's number, or a part of the data sheet's."""
    return _REACHED * LINKS[gpu][1] if rate is None else rate


def exchange(
    name: str, kind: str, whole: int, ranks: int, rate: float, under: tuple[str, float] | None = None
) -> Exchange:
    """Of a tensor that has `whole` bytes after an all-gather, or before it is reduced; `rate` in GB/s.

    A ring sends the part (n - 1) / n of them; an all-reduce twice as much.  `under`: what is computed meanwhile, ms.
    """
    sent = (2 if kind == "all-reduce" else 1) * whole * (ranks - 1) // ranks
    ms = _START_MS + 1e-6 * sent / rate
    covered = 0.0 if under is None else under[1]
    return Exchange(
        name=name,
        kind=kind,
        bytes=sent,
        ms=ms,
        hidden_under=None if under is None else under[0],
        exposed_ms=max(0.0, ms - covered),
    )


def exchanges(
    tokens: int,
    hidden: int,
    itemsize: int,
    numbers: int,
    ranks: int,
    rate: float,
    weight_product_ms: float,
    *,
    gradients: bool,
    sequence: bool,
) -> list[Exchange]:
    """Those of a loss: `numbers` float32 a token in forward, and, if it has hidden states, their gradient in float32.

    With `sequence`, each rank has the hidden states of its part of the tokens.
    """
    gathered = exchange("hidden", "all-gather", tokens * hidden * itemsize, ranks, rate)
    made = [gathered] if sequence else []
    made.append(exchange("statistics", "all-gather", 4 * numbers * tokens * ranks, ranks, rate))
    if gradients and hidden:
        under = "weight's gradient", weight_product_ms
        kind = "reduce-scatter" if sequence else "all-reduce"
        made += [msgspec.structs.replace(gathered, name="hidden, again")] if sequence else []
        made.append(exchange("hidden's gradient", kind, 4 * tokens * hidden, ranks, rate, under))
    return made
