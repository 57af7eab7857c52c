"""What a plan is asked for, and what an op answers.  Imports no framework."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from onchip.plan.document import Baseline
from onchip.plan.gpus import GPUS
from onchip.registry import OPS
from onchip.vocab.memory import Problem


@dataclass(frozen=True)
class PlannedCall:
    """The call that is planned; of a tensor-parallel call, one rank's part."""

    op: str
    problem: Problem
    """Its `hidden` is 0 for an op that has none; it asks for every gradient that the op has."""
    framework: str
    precision: str
    gpu: str
    gradients: bool
    entropy: bool = False
    teacher_hidden: int = 0
    linears: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The linear layers' input and output features, by name."""
    experts: int = 0
    """How many groups of rows there are, each with a weight of its own; or 0."""
    rows: int = 0
    """How many rows x has, where the product reads them by an index; or 0."""
    ranks: int = 1
    """How many ranks share a layer."""
    batch: int = 1
    """How many sequences the tokens belong to."""
    heads: int = 0
    """Attention's query heads."""
    key_heads: int = 0
    head_size: int = 0
    value_size: int = 0
    """The size of a head of values; 0 where it is `head_size`."""

    @property
    def measured(self) -> bool:
        """Whether it runs on a device with measured times."""
        return self.problem.device == "cuda" and GPUS[self.gpu].faster_memory is not None

    @property
    def has_rates(self) -> bool:
        """Whether the rates of its products are known."""
        return self.measured and self.problem.dtype != "float32"

    @property
    def wanted(self) -> Problem:
        """The problem, without its gradients if they aren't wanted."""
        p = self.problem
        return p if self.gradients else replace(p, grad_hidden=False, grad_weight=False)

    @property
    def products(self) -> int:
        """How many products a loss can't do without: those of the logits, hidden's gradient and the weight's."""
        return 2 + self.problem.grad_weight if self.gradients else 1


class StepPlan(NamedTuple):
    """What a call does in one budget."""

    memory_parts: dict[str, int]
    """Bytes at the peak, above inputs, results and returned gradients."""
    products: float
    """Matrix products of tokens x hidden x vocab."""
    recomputed_tokens: int
    """Tokens whose logits backward computes again."""
    chunk: dict[str, int]
    """How many tokens and entries of the vocabulary are worked on at a time."""
    ms: float | None
    """Predicted time; None where there is no model of the backend's time."""
    sent_bytes: int | None = None
    """Bytes that a rank sends; None for an op that one rank runs alone."""


@dataclass(frozen=True)
class Way:
    """How a backend runs the call: everything that a plan says about it comes from these."""

    step: Callable[[str, int | None], StepPlan]
    """What a strategy does in a budget (None: its default one); raises ValueError if the budget is too small."""
    least: Callable[[str], int]
    """Bytes of the smallest budget that a strategy runs in."""
    default: Callable[[str], int]
    """Bytes of the budget that a strategy takes by default."""
    strategies: tuple[str, ...] = ("auto",)
    chosen: Callable[[int | None], str] = lambda budget: "auto"
    """The strategy that a call takes in a budget; raises ValueError as `step` does."""


class LayerPlan(NamedTuple):
    """How an op without budgets runs each linear layer that is asked for."""

    step: Callable[[PlannedCall, str, str], StepPlan]
    """`step(asked, name, backend)`: what the op does for the layer of that name."""
    plain: tuple[str, str]
    """Name and expression of what it replaces."""
    plain_ms: Callable[[PlannedCall, tuple[int, int]], float | None] = lambda asked, features: None
    """`plain_ms(asked, (in, out))`: that expression's predicted time; None where there is no model of it."""

    def replaced(self, asked: PlannedCall) -> Baseline:
        """What all the layers together replace."""
        times = [self.plain_ms(asked, features) for features in asked.linears.values()]
        known = [ms for ms in times if ms is not None]
        name, expression = (text.format(dtype=asked.problem.dtype) for text in self.plain)
        return Baseline(name, expression, None, sum(known) if len(known) == len(times) else None)


class Backend(NamedTuple):
    """A backend of an op.  The op takes the first of its backends that doesn't refuse the call."""

    refusal: Callable[[PlannedCall], str | None]
    way: Callable[[PlannedCall], Way] | None = None
    """None for an op that has a `LayerPlan`."""


@dataclass(frozen=True)
class PlannedOp:
    """One op, as `onchip plan` knows it."""

    backends: Mapping[tuple[str, str], Mapping[str, Backend]]
    """By framework and precision, then by name, in the order in which the op tries them."""
    plain: Callable[[PlannedCall], Baseline]
    compiled: Callable[[PlannedCall], Baseline | None] = lambda asked: None
    """The same, compiled by torch.compile, where that was measured."""
    needs: tuple[str, ...] = ("hidden", "vocab")
    """Sizes that it can't do without."""
    takes: tuple[str, ...] = ()
    """Other sizes and options that it knows."""
    layer: LayerPlan | None = None
    """For an op that has a row for each layer."""
    source: str = ""
    """Where its times come from, if not from the GPU's own `source`."""
    logits: int = 1
    """Logits per token and entry of the vocabulary."""
    softcap: bool = True
    """Whether it can cap the logits."""
    fp8: bool = False
    """Whether its products are in FP8 at every precision."""
    ids: int = 0
    """Ids per token, for log-probabilities."""
    numbers: int = 3
    """How many float32 numbers per token ranks gather if they share the vocabulary: lse, its rounding error, and the
    target's log-probability; 0 where that is not known."""


def planned_op(name: str) -> PlannedOp:
    made: PlannedOp = OPS[name].entry("plan:PLAN")
    return made
