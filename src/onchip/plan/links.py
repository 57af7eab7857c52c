"""What ranks that share a vocabulary send each other, and how long that takes over a given link.

Imports no framework.
"""

import msgspec

# What each exchange takes in addition, whatever its size.
_START_MS = 0.01


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """What a call sends between ranks at one place."""

    name: str
    """What is exchanged."""
    kind: str
    """The collective: "all-gather", "all-reduce" or "reduce-scatter"."""
    bytes: int
    """What each rank sends, and receives."""
    ms: float | None
    """Predicted time; None where no rate was given."""
    hidden_under: str | None
    """What is computed meanwhile; None if nothing is."""
    exposed_ms: float | None
    """The part of the time that this computation doesn't hide; None where either time is not known."""


def exchange(
    name: str, kind: str, whole: int, ranks: int, rate: float | None, under: tuple[str, float | None] | None = None
) -> Exchange:
    """The exchange of a tensor that has `whole` bytes after an all-gather, or before it is reduced; `rate` in GB/s.

    In a ring of n ranks each sends (n - 1) / n of the tensor, and twice as much in an all-reduce.  `under`: what is
    computed meanwhile, and its time in ms.
    """
    sent = (2 if kind == "all-reduce" else 1) * whole * (ranks - 1) // ranks
    ms = None if rate is None else _START_MS + 1e-6 * sent / rate
    beside, covered = under or (None, 0.0)
    exposed = None if ms is None or covered is None else max(0.0, ms - covered)
    return Exchange(name=name, kind=kind, bytes=sent, ms=ms, hidden_under=beside, exposed_ms=exposed)


def exchanges(
    tokens: int,
    hidden: int,
    itemsize: int,
    numbers: int,
    ranks: int,
    rate: float | None,
    weight_product_ms: float | None,
    *,
    gradients: bool,
    sequence: bool,
    rounded: bool,
) -> list[Exchange]:
    """What ranks exchange in a loss.

    In forward they gather `numbers` float32 per token.  In backward they sum the gradient of hidden states, if there is
    one: in float32 or, if `rounded`, in the dtype of hidden states.  With `sequence`, each rank holds the hidden
    states of only its part of the tokens.
    """
    gathered = exchange("hidden", "all-gather", tokens * hidden * itemsize, ranks, rate)
    made = [gathered] if sequence else []
    made.append(exchange("statistics", "all-gather", 4 * numbers * tokens * ranks, ranks, rate))
    if gradients and hidden:
        under = "weight's gradient", weight_product_ms
        kind = "reduce-scatter" if sequence else "all-reduce"
        made += [msgspec.structs.replace(gathered, name="hidden, again")] if sequence else []
        made.append(
            exchange("hidden's gradient", kind, (itemsize if rounded else 4) * tokens * hidden, ranks, rate, under)
        )
    return made
