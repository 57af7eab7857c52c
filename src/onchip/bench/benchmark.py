"""The benchmark of a loss over a vocabulary: inputs, floor, reference and comparison for all ops and frameworks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from onchip.bench.harness import BenchedOp
from onchip.bench.peers import IGNORED, Function
from onchip.bench.timing import Step
from onchip.oracle.cases import draw_target, ignore_some, target_logit
from onchip.oracle.checks import dtype_name, plain_cross_entropy

# Elements of a matrix that are widened at a time.
CHUNK = 1 << 26


@dataclass(frozen=True)
class BenchProblem:
    """Inputs of one case, in the dtype and on the device of the run."""

    case: Any
    device: str
    arrays: tuple[Any, ...]
    """The op's arguments: hidden [T, H] and weight [V, H], or logits [T, V]; then the arguments that get no gradient,
    the first of which has a row for each token."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for every implementation."""
    columns: int | None = None
    """The columns of the logits that count, where the others only pad memory."""


@dataclass(frozen=True)
class Reference:
    """What a step should return in 'forward+backward', by name, and how far from it each result may be."""

    values: Mapping[str, Any]
    bounds: Mapping[str, float]
    forward: int
    """How many of these results 'forward' returns."""


@dataclass
class Benchmark(BenchedOp):
    """The benchmark of a loss in one framework; `fw` is that framework's adapter, `make` returns a `BenchProblem`."""

    rows: Callable[..., tuple[Any, ...]]
    """`rows(fw, logits, *others, **options)`: a value for each token; the loss is their sum."""
    leaves: Sequence[str] = ("hidden", "weight")
    forward: Callable[[BenchProblem], Sequence[str]] = lambda problem: ("loss",)
    """The names of what 'forward' returns: a mean loss, or values for each token."""

    def leaves_of(self, problem: BenchProblem) -> Sequence[str]:
        """The names of the arrays that get a gradient; for a frozen layer, hidden alone."""
        return self.leaves[:1] if getattr(problem.case, "frozen", False) else self.leaves

    @property
    def of_logits(self) -> bool:
        return tuple(self.leaves) == ("logits",)

    def plain_steps(self, problem: BenchProblem, function: Function) -> Mapping[str, Step]:
        """The steps of a function that takes the problem's arrays and options."""

        def of_columns(logits: Any, *others: Any) -> Any:
            return function(logits[:, : problem.columns], *others)

        sliced = problem.columns is not None and self.framework == "jax"  # PyTorch's logits are a view already
        given = of_columns if sliced else partial(function, **problem.options)
        leaves = len(self.leaves_of(problem))
        steps: Mapping[str, Step] = self.fw.steps(given, problem.arrays, leaves)
        return steps

    def floor(self, problem: BenchProblem, mode: str) -> Step:
        """The matrix products alone, for the tokens that count.  For logits, a copy that moves as many bytes: the loss
        reads them once and, in 'forward+backward', writes them once.
        """
        first, second, *others = problem.arrays
        step: Step
        if self.of_logits:
            # A copy reads and writes: of half the logits it moves the bytes of forward.
            step = self.fw.copies(first, (len(first) + 1) // 2 if mode == "forward" else len(first))
        else:
            first = first[: len(first) - round(problem.case.ignored * len(first))]
            second = self.fw.constant(second, dtype_name(first.dtype))  # autocast's copy
            frozen = len(self.leaves_of(problem)) == 1
            constants = [tuple(others)] if len(others) == 2 else []
            step = self.fw.products(mode, first, second, *constants, frozen=frozen)
        return step

    def reference(self, problem: BenchProblem) -> Reference:
        """The right results, which the framework computes in float64 by differentiating the definition.

        In float32 the bounds are those of a random walk of rounding errors over the sums; in 16 bits they are twice the
        errors of the framework's plain expression.
        """
        fw, forward = self.fw, tuple(self.forward(problem))
        names = (*forward, *(f"grad_{name}" for name in self.leaves_of(problem)))
        with fw.in_float64():
            values = dict(zip(names, self._values(problem), strict=True))
        tokens, size = problem.arrays[0].shape
        if self.of_logits:
            lengths = [size + tokens, 2 * size]
        else:
            vocab = len(problem.arrays[1])
            lengths = [*[size + vocab] * len(forward), size + 2 * vocab, size + vocab + tokens][: len(names)]
        dtype = problem.arrays[0].dtype
        eps = float(fw.xp.finfo(dtype).eps)
        limits = {name: eps * length**0.5 for name, length in zip(names, lengths, strict=True)}
        if dtype_name(dtype) != "float32":
            (plain,) = (impl for impl in self.IMPLEMENTATIONS if impl.name == fw.PLAIN)
            made = self.steps(problem, plain)["forward+backward"]()
            limits = {name: 2 * relative_error(fw, out, values[name]) for name, out in zip(names, made, strict=True)}
            # A single number may be right by luck.
            limits |= {name: max(limits[name], eps) for name in forward}
        return Reference(values, limits, len(forward))

    def _values(self, problem: BenchProblem) -> list[Any]:
        """The values of 'forward' and the gradients of the leaves, computed for a chunk of tokens at a time."""
        fw, (first, *others) = self.fw, problem.arrays  # hidden or logits
        weight = None if self.of_logits else fw.wide(others.pop(0))
        of_token, *constants = others
        constants = [fw.wide(x) for x in constants]
        columns = (problem.columns or first.shape[1]) if weight is None else len(weight)
        # The mean divides by the tokens that are not ignored.
        count = len(first) if of_token.ndim > 1 else (of_token != IGNORED).sum().clip(min=1)
        # Beside 16-bit logits, float32 is enough for a gradient of their size.
        kept_as = "float64" if dtype_name(first.dtype) == "float32" else "float32"
        grad_weight, parts, trained = 0.0, [], len(self.leaves_of(problem)) == 2
        for chunk in chunks(len(first), columns):
            x = fw.wide(first[chunk])
            z = x[:, :columns] if weight is None else x @ weight.T
            rows = partial(self.rows, fw, **problem.options)
            values, g = fw.gradient(rows, z, of_token[chunk], *constants)
            g = g / count
            if weight is not None:
                if trained:
                    grad_weight = grad_weight + g.T @ x
                parts.append((*values, g @ weight))
            else:
                padded = fw.xp.concatenate([g, fw.xp.zeros_like(x[:, columns:])], 1)
                parts.append((*values, fw.constant(padded, kept_as)))
        *values, gradient = (fw.xp.concatenate(made) for made in zip(*parts, strict=True))
        if tuple(self.forward(problem)) == ("loss",):
            values = [values[0].sum() / count]
        return [*values, gradient, *([grad_weight] if trained else [])]

    def check(self, reference: Reference, mode: str, returned: Sequence[Any]) -> dict[str, tuple[float, float]]:
        """Relative error and bound for each result of a step; the gradient of a weight [H, V] is [H, V]."""
        names = list(reference.values)[: reference.forward if mode == "forward" else None]
        checked = {}
        for name, out in zip(names, returned, strict=True):
            ref = reference.values[name]
            turned = out.T if out.shape != ref.shape and tuple(out.shape[::-1]) == tuple(ref.shape) else out
            checked[name] = (relative_error(self.fw, turned, ref), reference.bounds[name])
        return checked


def chunks(rows: int, columns: int) -> list[slice]:
    """Slices of a matrix's rows that are widened at a time."""
    size = max(1, CHUNK // columns)
    return [slice(i, i + size) for i in range(0, rows, size)]


def relative_error(fw: Any, out: Any, ref: Any) -> float:
    """||out - ref|| / ||ref||, in float64."""
    if out.shape != ref.shape:
        raise ValueError(f"a result has shape {list(out.shape)} where {list(ref.shape)} is right")
    error = norm = 0.0
    with fw.in_float64():
        out, ref = fw.xp.atleast_2d(out), fw.xp.atleast_2d(ref)
        for rows in chunks(*ref.shape):
            right = fw.wide(ref[rows])
            error += float(((fw.wide(out[rows]) - right) ** 2).sum())
            norm += float((right**2).sum())
    return math.sqrt(error / norm)


def draw_layer(normal: Callable[..., Any], case: Any, hidden: int) -> tuple[Any, Any]:
    """float32 hidden [T, H] ~ N(0, 1), and a weight [V, H] with which logits are ~ N(0, logit_std)."""
    return normal(case.tokens, hidden), normal(case.vocab, hidden, case.logit_std / hidden**0.5)


def draw_linear(fw: Any, case: Any, device: str, dtype: str) -> tuple[Any, Any, Any]:
    """Hidden, weight and labels for a case, distributed as in `onchip.oracle.cases.make_inputs`."""
    rng = np.random.default_rng(0)
    hidden, weight = draw_layer(fw.drawer(device), case, case.hidden)
    labels = draw_target(case, rng)
    if case.target_prob is not None:
        chosen = weight[fw.ids(labels, device)]
        missing = target_logit(case) - (hidden * chosen).sum(1)[:, None]
        hidden = hidden + missing / (chosen * chosen).sum(1)[:, None] * chosen
    ignore_some(case, labels, rng)
    of_weight = "float32" if getattr(case, "autocast", False) else dtype
    weight = (fw.constant if getattr(case, "frozen", False) else fw.leaf)(weight, of_weight)
    return fw.leaf(hidden, dtype), weight, fw.ids(labels, device)


def cross_entropies(fw: Any, z: Any, labels: Any, **options: Any) -> tuple[Any]:
    """The cross-entropies [T], 0 where the label is IGNORED."""
    return (plain_cross_entropy(z, labels, **options | {"reduction": "none"}),)
