"""The benchmark of a loss over a vocabulary: inputs, floor, reference and comparison, once for all ops and frameworks.

A framework is imported when an attribute needs it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from types import ModuleType
from typing import Any

from onchip.bench.peers import IGNORED, Implementation, Peer, bounds
from onchip.bench.timing import Step
from onchip.core.sizes import DTYPE_BYTES
from onchip.oracle.cases import target_logit


def adapter(framework: str) -> Any:
    """`onchip.bench.torch_steps` or `onchip.bench.jax_steps`, which have the same names."""
    return import_module(f"onchip.bench.{framework}_steps")


@dataclass(frozen=True)
class Problem:
    """Inputs of one case, in the dtype and on the device of the run."""

    arrays: tuple[Any, ...]
    """What the op takes: hidden [T, H] and weight [V, H], or logits [T, V], then what gets no gradient."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of every implementation."""
    columns: int | None = None
    """So many columns of the logits are theirs, the others only memory."""


@dataclass(frozen=True)
class Reference:
    """What a step should return in 'forward+backward', by name, and how far from it each may be."""

    values: Mapping[str, Any]
    bounds: Mapping[str, float]
    forward: int
    """So many of them are what 'forward' returns."""


@dataclass
class Benchmark:
    """What `onchip bench` needs to know of one op in one framework: the names that `onchip.bench.harness.Op` lists."""

    framework: str
    cases: ModuleType
    make: Callable[[Any, Any, str, str], Problem]
    """The inputs, by the framework's adapter from a case, a device and a dtype."""
    peers: Callable[[Any], Sequence[Peer | Implementation]]
    """What is timed, by the adapter; of a peer, the steps are those of its function."""
    rows: Callable[..., tuple[Any, ...]]
    """`rows(fw, logits, *others, **options)`: the values of each token, of which the loss is the sum."""
    leaves: Sequence[str] = ("hidden", "weight")
    row_arrays: Sequence[int] = (2,)
    """Which of the problem's other arrays have a row for each token; the rest comes after them, in float64."""
    forward: Callable[[Problem], Sequence[str]] = lambda problem: ("loss",)
    """The names of what 'forward' returns: a mean loss, or values of each token."""
    DTYPES: Sequence[str] = tuple(DTYPE_BYTES)

    def __post_init__(self) -> None:
        self.CASES: Mapping[str, Any] = self.cases.BENCH_CASES
        self.DEFAULT_CASES: Mapping[str, Sequence[str]] = self.cases.DEFAULT_BENCH_CASES

    @cached_property
    def fw(self) -> Any:
        return adapter(self.framework)

    @cached_property
    def IMPLEMENTATIONS(self) -> tuple[Implementation, ...]:
        return tuple(Implementation(p, self.steps) if isinstance(p, Peer) else p for p in self.peers(self.fw))

    def make_problem(self, case: Any, device: str, dtype: str) -> Problem:
        with self.fw.default_device(device):
            return self.make(self.fw, case, device, dtype)

    def steps(self, problem: Problem, peer: Peer) -> Mapping[str, Step]:
        steps: Mapping[str, Step] = self.fw.steps(self.function(problem, peer.load()), problem.arrays, len(self.leaves))
        return steps

    def function(self, problem: Problem, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` of the problem's arrays."""
        if problem.columns is not None and self.framework == "jax":
            return lambda logits, labels: function(logits[:, : problem.columns], labels)
        return partial(function, **problem.options)

    def floor(self, problem: Problem, mode: str) -> Step:
        """The matrix products alone.  Of logits a copy that moves the same bytes: they are read once, and in
        'forward+backward' written once too."""
        first, second, *others = problem.arrays
        made: Step
        if self.leaves == ("logits",):
            # In forward half of them are read, and as much is written.
            made = self.fw.copies(first, (len(first) + 1) // 2 if mode == "forward" else len(first))
        else:
            made = self.fw.products(mode, first, second, *([tuple(others)] if len(others) == 2 else []))
        return made

    def reference(self, problem: Problem) -> Reference:
        """In the framework's float64, a chunk of tokens at a time, by its derivative of the definition."""
        fw, forward = self.fw, tuple(self.forward(problem))
        walk = self._logits if self.leaves == ("logits",) else self._linear
        names = (*forward, *(f"grad_{name}" for name in self.leaves))
        values = dict(zip(names, fw.in_float64(partial(walk, problem), *problem.arrays), strict=True))
        tokens, size = problem.arrays[0].shape
        if self.leaves == ("logits",):
            lengths = [size + tokens, 2 * size]
        else:
            vocab = len(problem.arrays[1])
            lengths = [*[size + vocab] * len(forward), size + 2 * vocab, size + vocab + tokens]
        errors = None
        if fw.dtype_name(problem.arrays[0].dtype) != "float32":
            (plain,) = (impl for impl in self.IMPLEMENTATIONS if impl.name == fw.PLAIN)
            made = plain.steps(problem)["forward+backward"]()
            errors = [fw.relative_error(out, ref) for out, ref in zip(made, values.values(), strict=True)]
        limits = bounds(names, lengths, errors, fw.eps(problem.arrays[0]), forward=len(forward))
        return Reference(values, limits, len(forward))

    def _linear(self, problem: Problem, hidden: Any, weight: Any, *others: Any) -> tuple[Any, ...]:
        fw, w = self.fw, self.fw.wide(weight)
        by_row = [others[i - 2] for i in self.row_arrays]
        fixed = [fw.wide(x) for i, x in enumerate(others, 2) if i not in self.row_arrays]
        count = self._count(hidden, by_row)

        def one(grad_weight: Any, h: Any, *rows: Any) -> tuple[Any, Any]:
            h = fw.wide(h)
            values, g = fw.gradient(lambda z: self.rows(fw, z, *rows, *fixed, **problem.options), h @ w.T)
            g = g / count
            return grad_weight + g.T @ h, (*values, g @ w)

        start = fw.xp.zeros_like(w)
        grad_weight, (*values, grad_hidden) = fw.scan_rows(one, start, (hidden, *by_row), 8 * len(w))
        return *self._reduced(problem, values, count), grad_hidden, grad_weight

    def _logits(self, problem: Problem, logits: Any, labels: Any) -> tuple[Any, ...]:
        fw, count = self.fw, self._count(logits, [labels])
        columns = problem.columns or logits.shape[1]
        # Beside 16-bit logits the gradient is kept in float32.
        kept_as = "float64" if fw.dtype_name(logits.dtype) == "float32" else "float32"

        def one(carry: None, x: Any, label: Any) -> tuple[None, Any]:
            values, g = fw.gradient(lambda z: self.rows(fw, z, label), fw.wide(x[:, :columns]))
            g = fw.xp.concatenate([g / count, fw.xp.zeros_like(fw.wide(x[:, columns:]))], 1)
            return None, (*values, fw.constant(g, kept_as))

        _, (*values, gradient) = fw.scan_rows(one, None, (logits, labels), 8 * columns)
        return *self._reduced(problem, values, count), gradient

    def _count(self, first: Any, by_row: Sequence[Any]) -> Any:
        """What the mean divides by: the tokens that are not ignored."""
        if by_row[0].ndim > 1:
            return len(first)
        return (by_row[0] != IGNORED).sum().clip(min=1)

    def _reduced(self, problem: Problem, values: Sequence[Any], count: Any) -> list[Any]:
        return [values[0].sum() / count] if tuple(self.forward(problem)) == ("loss",) else list(values)

    def check(self, reference: Reference, mode: str, returned: Sequence[Any]) -> dict[str, tuple[float, float]]:
        """Relative error and bound of each thing that a step returned; the gradient of a weight [H, V] is [H, V]."""
        names = list(reference.values)[: reference.forward if mode == "forward" else None]
        checked = {}
        for name, out in zip(names, returned, strict=True):
            ref = reference.values[name]
            turned = out.T if out.shape != ref.shape and tuple(out.shape[::-1]) == tuple(ref.shape) else out
            checked[name] = (self.fw.relative_error(turned, ref), reference.bounds[name])
        return checked


def draw_layer(fw: Any, draws: Any, case: Any, hidden: int) -> tuple[Any, Any]:
    """float32 hidden [T, H] ~ N(0, 1), and weight [V, H] that makes logits ~ N(0, logit_std) of it."""
    return draws.normal(case.tokens, hidden), draws.normal(case.vocab, hidden, case.logit_std / hidden**0.5)


def draw_linear(fw: Any, case: Any, device: str, dtype: str) -> tuple[Any, Any, Any]:
    """Hidden, weight and labels as the case says, distributed as `onchip.oracle.cases.make_inputs` has them."""
    draws = fw.Draws(device)
    hidden, weight = draw_layer(fw, draws, case, case.hidden)
    labels = draws.labels(case)
    if case.target_prob is not None:
        chosen = weight[labels]
        missing = target_logit(case) - (hidden * chosen).sum(1)[:, None]
        hidden = hidden + missing / (chosen * chosen).sum(1)[:, None] * chosen
    return fw.leaf(hidden, dtype), fw.leaf(weight, dtype), draws.ignore(case, labels)


def cross_entropies(fw: Any, z: Any, labels: Any) -> tuple[Any]:
    """[T], 0 where the label is IGNORED."""
    kept = labels != IGNORED
    picked = fw.take(fw.log_softmax(z, -1), fw.xp.where(kept, labels, 0)[:, None])[:, 0]
    return (fw.xp.where(kept, -picked, 0),)
