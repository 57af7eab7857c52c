"""What `onchip plan` says, as data.  Imports no framework."""

import msgspec

from onchip.plan.links import Exchange


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the op: in one budget or, for an op without budgets, one layer."""

    name: str
    """ "smallest", "default", "fastest", or the budget; for an op without budgets, the layer's name."""
    strategy: str
    """The `strategy` argument that it is planned for."""
    scratch_bytes: int | None
    """What to pass as scratch_bytes; None to leave it out."""
    budget_bytes: int | None
    """The bound on memory, given or by default; None where there is none."""
    fits: bool
    """Whether it runs in the budget; if not, everything below `needs_bytes` is null."""
    needs_bytes: int
    """The smallest scratch_bytes that this strategy runs in."""
    memory_bytes: int | None = None
    """Peak memory above inputs, results and returned gradients."""
    memory_parts: dict[str, int] | None = None
    """What the memory consists of, in bytes."""
    products: float | None = None
    """Matrix products of tokens x hidden x vocab; a pass that is partly repeated counts in part."""
    recomputed_tokens: int | None = None
    """Tokens whose logits backward computes a second time."""
    chunk: dict[str, int] | None = None
    """How many elements are worked on at a time."""
    ms: float | None = None
    """Predicted time; None where there is no model of it."""
    sent_bytes: int | None = None
    """For layers that ranks share: what this rank sends to others."""
    plain_ms: float | None = None
    """For an op without budgets: the baseline's predicted time for the layer."""


class Baseline(msgspec.Struct, frozen=True):
    """What the op replaces: its expression in the framework's own functions."""

    name: str
    """What people call it."""
    expression: str
    """What it computes."""
    memory_bytes: int | None = None
    """Peak memory above inputs, results and returned gradients; None where it isn't known."""
    ms: float | None = None
    """Predicted time; None where there is no model of it."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What `onchip plan` says, and its --json."""

    verdict: str
    """The plan in a sentence or two."""
    op: str
    """The op's name."""
    framework: str
    """ "torch" or "jax"."""
    backend: str
    """The backend that was asked for, or the one that the op takes."""
    precision: str
    """ "full" or "fp8"."""
    device: str
    """ "cuda" or "cpu"."""
    gpu: str | None
    """The GPU that it is for; None on the CPU."""
    model: str | None
    """The model's name, if the sizes are a model's."""
    sizes: dict[str, int]
    """The op's sizes on one rank, by name."""
    dtype: str
    """The inputs' dtype."""
    weight_dtype: str
    """The weight's dtype."""
    gradients: bool
    """True for forward and backward, False for forward only."""
    frozen: bool
    """Whether the weight needs no gradient."""
    weight_grad_out: bool
    """Whether its gradient is added to a tensor of the caller's."""
    tensor_parallel: int
    """How many ranks share the vocabulary or the layers."""
    sequence_parallel: bool
    """Whether each rank holds the hidden states of only its part of the tokens."""
    link: float | None
    """GB/s between two ranks, as given."""
    exchanges: list[Exchange]
    """What a rank sends to the others, in the order of the call."""
    logits_bytes: int | None
    """The size of the float32 logits, which the op doesn't store."""
    baseline: Baseline
    """What the op replaces."""
    compiled: Baseline | None
    """The same under torch.compile; None where that wasn't measured."""
    rows: list[Row]
    """Ways to run it; of several with one name, the first is the one that the op takes."""
    notes: list[str]
    """What the numbers leave out, and where the times come from."""

    def row(self, name: str) -> Row:
        """The first row of this name; KeyError where there is none."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)
