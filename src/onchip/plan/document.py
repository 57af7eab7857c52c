"""What `onchip plan` says, as data.  No framework."""

import msgspec

from onchip.plan.links import Exchange


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the op: in one budget, or of an op without budgets one layer."""

    name: str
    """ "smallest", "default", "fastest", or the budget; of an op without budgets the layer."""
    strategy: str
    """What strategy= it is the plan of."""
    scratch_bytes: int | None
    """What to pass as scratch_bytes; None to leave it out."""
    budget_bytes: int | None
    """The bound on memory, also the default one; None where there is none."""
    fits: bool
    """Whether it runs; if not, the rest is null, but for `needs_bytes`."""
    needs_bytes: int
    """The smallest scratch_bytes that this strategy runs in."""
    memory_bytes: int | None = None
    """Peak memory above inputs, results and returned gradients."""
    memory_parts: dict[str, int] | None = None
    """What it consists of."""
    products: float | None = None
    """Matrix products of tokens x hidden x vocab, those of a pass that runs again in part counted in part."""
    recomputed_tokens: int | None = None
    """Tokens whose logits backward computes a second time."""
    chunk: dict[str, int] | None = None
    """What is worked on at a time."""
    ms: float | None = None
    """Predicted time; None where there is no model of it."""
    sent_bytes: int | None = None
    """Of layers that ranks share: what this rank sends to others."""
    plain_ms: float | None = None
    """What the baseline is predicted to take for the layer, of an op without budgets."""


class Baseline(msgspec.Struct, frozen=True):
    """What the op replaces: its expression in the framework's own functions."""

    name: str
    """A word for it."""
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
    """Its name."""
    framework: str
    """ "torch" or "jax"."""
    backend: str
    """The one that the op takes, or that was asked for."""
    precision: str
    """ "full" or "fp8"."""
    device: str
    """ "cuda" or "cpu"."""
    gpu: str | None
    """What it is for; None on the CPU."""
    model: str | None
    """Its name, where the sizes are a model's."""
    sizes: dict[str, int]
    """The op's own, of one rank, by name."""
    dtype: str
    """The inputs'."""
    weight_dtype: str
    """The weight's."""
    gradients: bool
    """Whether it is of forward and backward, or of forward alone."""
    frozen: bool
    """Whether the weight needs no gradient."""
    weight_grad_out: bool
    """Whether its gradient is added to a tensor of the caller's."""
    tensor_parallel: int
    """Ranks that share the vocabulary or the layers."""
    sequence_parallel: bool
    """Whether each of them has the hidden states of its part of the tokens."""
    link: float | None
    """GB/s between two ranks, as given."""
    exchanges: list[Exchange]
    """What a rank sends to the others, in the order of the call."""
    logits_bytes: int | None
    """Of the float32 logits, which the op doesn't store."""
    baseline: Baseline
    """What the op replaces."""
    compiled: Baseline | None
    """The same under torch.compile; None where that wasn't measured."""
    rows: list[Row]
    """Ways to run it; of several of one name the first is what the op takes."""
    notes: list[str]
    """What the numbers leave out, and where the times come from."""

    def row(self, name: str) -> Row:
        """The first row of this name; KeyError where there is none."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)
