"""What `onchip bench` needs to know of this op: the names that `onchip.bench.harness.Op` lists, and no more.

Bench cases are plain: mean over the tokens, no bias, no options; so every peer can run them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import onchip
from onchip.ops.linear_cross_entropy import cases, spec
from onchip.ops.linear_cross_entropy.peers import PEERS, Loss, Peer
from onchip.ops.linear_cross_entropy.reference import linear_cross_entropy as oracle
from onchip.ops.linear_cross_entropy.torch_op import linear_cross_entropy

CASES = cases.BENCH_CASES
DEFAULT_CASES = cases.DEFAULT_BENCH_CASES
DTYPES = tuple(spec.DTYPE_BYTES)

Step = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Problem:
    """Inputs of one case, in the dtype and on the device of the run."""

    hidden: Tensor  # [T, H], a leaf that requires grad
    weight: Tensor  # [V, H], a leaf that requires grad
    target: Tensor  # [T]

    @property
    def spec(self) -> spec.Problem:
        tokens, hidden = self.hidden.shape
        dtype = str(self.hidden.dtype).removeprefix("torch.")
        return spec.Problem(tokens, hidden, self.weight.shape[0], dtype=dtype, device=self.hidden.device.type)


def make_problem(case: cases.Case, device: str, dtype: str) -> Problem:
    """The inputs of `case` as tensors."""
    inputs = cases.make_inputs(case)
    assert inputs.bias is None
    assert inputs.token_weight is None
    assert not case.options
    assert not case.ignored
    hidden, weight = (torch.from_numpy(x).to(device, getattr(torch, dtype)) for x in (inputs.hidden, inputs.weight))
    return Problem(hidden.requires_grad_(), weight.requires_grad_(), torch.from_numpy(inputs.target).to(device))


def _steps(problem: Problem, loss: Loss) -> dict[str, Step]:
    def forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return [loss(problem.hidden, problem.weight, problem.target)]

    def both() -> Sequence[Tensor]:
        value = loss(problem.hidden, problem.weight, problem.target)
        return [value.detach(), *torch.autograd.grad(value, (problem.hidden, problem.weight))]

    return {"forward": forward, "forward+backward": both}


# -------------------------------------------------------------------------------------------------- implementations


@dataclass(frozen=True)
class Own:
    """This package's op with one choice of strategy."""

    name: str
    strategy: str
    small_scratch: bool = False

    def version(self) -> str:
        return onchip.__version__

    def unavailable(self, device: str, dtype: str) -> str | None:
        return None

    def scratch_bytes(self, problem: spec.Problem) -> int | None:
        """A sixteenth of the float32 logits, or what the smallest chunk needs; or the op's default."""
        if not self.small_scratch:
            return None
        return max(spec.logits_bytes(problem) // 16, spec.scratch_at_least(_at_worst(problem), self.strategy))

    def config(self, problem: Problem, mode: str) -> dict[str, Any]:
        p = problem.spec
        budget = self.scratch_bytes(p)
        if mode == "forward":
            p = replace(p, grad_hidden=False, grad_weight=False)
        plan = spec.plan(p, spec.choose_strategy(_at_worst(p), self.strategy, budget), budget)
        return {"scratch_bytes": budget, **vars(plan)}

    def steps(self, problem: Problem) -> dict[str, Step]:
        budget = self.scratch_bytes(problem.spec)

        def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
            return linear_cross_entropy(hidden, weight, target, strategy=self.strategy, scratch_bytes=budget)

        return _steps(problem, loss)


def _at_worst(p: spec.Problem) -> spec.Problem:
    """What the op takes `p` for while it hasn't looked at the targets yet."""
    return replace(p, compacted=p.device == "cpu")


@dataclass(frozen=True)
class Other:
    """A peer's function."""

    peer: Peer

    @property
    def name(self) -> str:
        return self.peer.name

    def version(self) -> str:
        return torch.__version__.partition("+")[0]

    def unavailable(self, device: str, dtype: str) -> str | None:
        return self.peer.unavailable(device, dtype)

    def config(self, problem: Problem, mode: str) -> dict[str, Any]:
        return self.peer.config

    def steps(self, problem: Problem) -> dict[str, Step]:
        return _steps(problem, self.peer.load())


IMPLEMENTATIONS = (
    Own("onchip auto", "auto"),
    Own("onchip stash", "stash"),
    Own("onchip recompute", "recompute", small_scratch=True),
    *(Other(peer) for peer in PEERS),
)


def floor(problem: Problem, mode: str) -> Step:
    """The matrix products alone, into buffers that exist already: the logits, then both gradients."""
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    logits = hidden.new_empty(len(hidden), len(weight))
    if mode == "forward":
        return lambda: [torch.mm(hidden, weight.T, out=logits)]
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def products() -> Sequence[Tensor]:
        torch.mm(hidden, weight.T, out=logits)
        torch.mm(logits, weight, out=grad_hidden)
        torch.mm(logits.T, hidden, out=grad_weight)
        return [grad_hidden, grad_weight]

    return products


# ------------------------------------------------------------------------------------------------------ correctness


@dataclass(frozen=True)
class Reference:
    """What a step should return in 'forward+backward', in float64, and how far from it each may be."""

    values: Sequence[Tensor]
    bounds: Sequence[float]


def reference(problem: Problem) -> Reference:
    """The float64 oracle on the CPU, on a GPU (where that would take minutes) the framework's own float64."""
    values = _float64_on_gpu(problem) if problem.hidden.is_cuda else _float64_on_cpu(problem)
    eps = torch.finfo(problem.hidden.dtype).eps
    if problem.hidden.dtype == torch.float32:
        # Rounding errors of a sum add up like a random walk over all the products that it is made of.
        tokens, hidden, vocab = len(problem.hidden), problem.hidden.shape[1], len(problem.weight)
        lengths = (hidden + vocab, hidden + 2 * vocab, hidden + vocab + tokens)
        return Reference(values, [eps * n**0.5 for n in lengths])
    # Twice the error of the plain expression in this dtype.  Its loss is a single number, which may be right by luck,
    # so that counts as no better than one rounding.
    loss = F.cross_entropy(F.linear(problem.hidden, problem.weight), problem.target)
    plain = (loss.detach(), *torch.autograd.grad(loss, (problem.hidden, problem.weight)))
    errors = [_relative_error(out, ref) for out, ref in zip(plain, values, strict=True)]
    return Reference(values, [2 * max(errors[0], eps / 2), *(2 * e for e in errors[1:])])


def _float64_on_cpu(problem: Problem) -> tuple[Tensor, ...]:
    hidden, weight = (x.detach().float().numpy() for x in (problem.hidden, problem.weight))
    result = oracle(hidden, weight, problem.target.numpy())
    return tuple(torch.from_numpy(x) for x in (result.loss, result.grad_hidden, result.grad_weight))


def _float64_on_gpu(problem: Problem, chunk: int = 512) -> tuple[Tensor, ...]:
    weight = problem.weight.detach().double().requires_grad_()
    losses, grads_hidden = [], []
    for rows, target in zip(problem.hidden.detach().split(chunk), problem.target.split(chunk), strict=True):
        hidden = rows.double().requires_grad_()
        loss = F.cross_entropy(F.linear(hidden, weight), target, reduction="sum") / len(problem.target)
        loss.backward()
        losses.append(loss.detach())
        grads_hidden.append(hidden.grad)
    assert weight.grad is not None
    return torch.stack(losses).sum(), torch.cat(grads_hidden), weight.grad


def check(reference: Reference, mode: str, returned: Sequence[Tensor]) -> tuple[float, float]:
    """Relative error and bound of the one among loss and gradients that is nearest its bound, or furthest past it."""
    count = 1 if mode == "forward" else len(reference.values)
    errors = [_relative_error(out, ref) for out, ref in zip(returned, reference.values[:count], strict=True)]
    return max(zip(errors, reference.bounds, strict=False), key=lambda pair: _nan_is_worst(pair[0] / pair[1]))


def _nan_is_worst(x: float) -> float:
    return math.inf if math.isnan(x) else x


def _relative_error(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref||, in float64 and a few rows at a time."""
    if out.shape != ref.shape:
        raise ValueError(f"a result has shape {list(out.shape)} where {list(ref.shape)} is right")
    blocks = zip(torch.atleast_1d(out).split(4096), torch.atleast_1d(ref).split(4096), strict=True)
    error = sum(float((o.double() - r).square().sum()) for o, r in blocks)
    return math.sqrt(error) / float(ref.norm())
