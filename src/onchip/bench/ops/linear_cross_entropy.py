"""What `onchip bench` needs to know of this op: the names that `onchip.bench.harness.Op` lists, and no more.

Bench cases are plain: mean over the tokens that are not ignored, no bias, no options; so every peer can run them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import onchip
from onchip.bench.ops.linear_cross_entropy_peers import PEERS, Loss
from onchip.bench.peers import Implementation, Peer
from onchip.bench.torch_steps import Reference, Step, bounds_of, gradient_step
from onchip.core.sizes import DTYPE_BYTES, MIB
from onchip.ops.fp8_linear.torch_op import quantize_weight
from onchip.ops.linear_cross_entropy import cases, fp8_op
from onchip.ops.linear_cross_entropy.reference import linear_cross_entropy as oracle
from onchip.ops.linear_cross_entropy.torch_op import linear_cross_entropy
from onchip.oracle.cases import target_logit
from onchip.vocab import memory
from onchip.vocab.fp8 import memory as fp8_spec
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.triton import plan as planning

CASES = cases.BENCH_CASES
DEFAULT_CASES = cases.DEFAULT_BENCH_CASES
DTYPES = tuple(DTYPE_BYTES)

IGNORED = -100  # the ignore_index that all implementations have by default

ScratchBytes = Callable[[memory.Problem], int | None]
"""The budget for a problem; None for the op's default."""


@dataclass(frozen=True)
class Problem:
    """Inputs of one case, in the dtype and on the device of the run."""

    hidden: Tensor  # [T, H], a leaf that requires grad
    weight: Tensor  # [V, H], a leaf that requires grad
    target: Tensor  # [T]

    @property
    def spec(self) -> memory.Problem:
        tokens, hidden = self.hidden.shape
        dtype = str(self.hidden.dtype).removeprefix("torch.")
        return memory.Problem(tokens, hidden, self.weight.shape[0], dtype=dtype, device=self.hidden.device.type)


def make_problem(case: cases.Case, device: str, dtype: str) -> Problem:
    """The inputs of `case` as tensors."""
    plain = replace(case, logit_std=1.0, target_prob=None, zipf=False, ignored=0.0)
    assert plain == cases.Case(case.name, case.tokens, case.hidden, case.vocab)
    if device == "cuda":
        hidden, weight, target = _draw(case, device)
    else:
        inputs = cases.make_inputs(case)
        hidden, weight, target = (torch.from_numpy(x) for x in (inputs.hidden, inputs.weight, inputs.target))
    hidden, weight = (x.to(getattr(torch, dtype)).requires_grad_() for x in (hidden, weight))
    return Problem(hidden, weight, target)


def _draw(case: cases.Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden, weight and target as `cases.make_inputs` has them, but drawn on the device.

    The distributions are the same and the numbers are not.  NumPy draws a billion normal numbers on one core.
    """
    rng = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(case.tokens, case.hidden, generator=rng, device=device)
    weight = torch.randn(case.vocab, case.hidden, generator=rng, device=device)
    weight *= case.logit_std / case.hidden**0.5
    if case.zipf:
        rank = torch.arange(1, case.vocab + 1, device=device)
        target = torch.multinomial(1 / rank, case.tokens, replacement=True, generator=rng)
    else:
        target = torch.randint(case.vocab, (case.tokens,), generator=rng, device=device)
    if case.target_prob is not None:
        chosen = weight[target]
        missing = target_logit(case) - (hidden * chosen).sum(1, keepdim=True)
        hidden += missing / chosen.square().sum(1, keepdim=True) * chosen
    shuffled = torch.randperm(case.tokens, generator=rng, device=device)
    target[shuffled[: round(case.ignored * case.tokens)]] = IGNORED
    return hidden, weight, target


def _steps(problem: Problem, loss: Loss) -> dict[str, Step]:
    def forward() -> Sequence[Tensor]:
        # Detached as well: some functions look at requires_grad alone and would compute gradients.
        with torch.no_grad():
            return [loss(problem.hidden.detach(), problem.weight.detach(), problem.target)]

    leaves = (problem.hidden, problem.weight)
    both = gradient_step(lambda: loss(*leaves, problem.target), leaves)
    return {"forward": forward, "forward+backward": both}


# -------------------------------------------------------------------------------------------------- implementations


def _default(problem: memory.Problem) -> None:
    return None


def _part_of_logits(n: int, strategy: str) -> ScratchBytes:
    """The float32 logits' bytes / n, or what the smallest chunk needs."""
    return lambda problem: max(memory.logits_bytes(problem) // n, memory.scratch_at_least(_at_worst(problem), strategy))


@dataclass(frozen=True)
class Own:
    """This package's op with one choice of strategy and budget."""

    name: str
    strategy: str
    scratch_bytes: ScratchBytes = _default
    only_cuda: bool = False

    def version(self) -> str:
        return onchip.__version__

    def unavailable(self, device: str, dtype: str) -> str | None:
        return "a budget for GPUs" if self.only_cuda and device != "cuda" else None

    def config(self, problem: Problem, mode: str) -> dict[str, Any]:
        p = problem.spec
        budget = self.scratch_bytes(p)
        if mode == "forward":
            p = replace(p, grad_hidden=False, grad_weight=False)
        if planning.refusal(p.device, problem.hidden.device.index, problem.hidden.dtype) is None:
            return {"backend": "triton", "scratch_bytes": budget, **vars(triton_spec.plan(p, self.strategy, budget))}
        plan = memory.plan(p, memory.choose_strategy(_at_worst(p), self.strategy, budget), budget)
        return {"scratch_bytes": budget, **vars(plan)}

    def steps(self, problem: Problem) -> dict[str, Step]:
        budget = self.scratch_bytes(problem.spec)

        def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
            return linear_cross_entropy(hidden, weight, target, strategy=self.strategy, scratch_bytes=budget)

        return _steps(problem, loss)


@dataclass(frozen=True)
class InFp8:
    """This package's op with precision='fp8' on the kernels: an approximation, held to bounds of its own."""

    name: str
    before: bool
    """Whether the weight is quantised before the timed steps, as for the later micro-batches of a step."""

    @property
    def error_bounds(self) -> dict[str, float]:
        """The loss, and 25 dB of each gradient."""
        return {"loss": 1e-3, "grad_hidden": 10 ** (-25 / 20), "grad_weight": 10 ** (-25 / 20)}

    def version(self) -> str:
        return onchip.__version__

    def unavailable(self, device: str, dtype: str) -> str | None:
        return fp8_op.refusals(torch.device(device))["triton"]

    def config(self, problem: Problem, mode: str) -> dict[str, Any]:
        return {
            "precision": "fp8",
            "backend": "triton",
            "weight_quantised_before": self.before,
            "chunk": fp8_spec.plan(problem.spec, None),
        }

    def steps(self, problem: Problem) -> dict[str, Step]:
        copies = quantize_weight(problem.weight) if self.before else None

        def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
            given = weight if copies is None else copies._replace(weight=weight)
            return linear_cross_entropy(hidden, given, target, precision="fp8", backend="triton")

        return _steps(problem, loss)


def _at_worst(p: memory.Problem) -> memory.Problem:
    """What the op takes `p` for while it hasn't looked at the targets yet."""
    return replace(p, compacted=p.device == "cpu")


def _peer_steps(problem: Problem, peer: Peer) -> dict[str, Step]:
    return _steps(problem, peer.load())


IMPLEMENTATIONS = (
    Own("onchip auto", "auto"),
    Own("onchip, 64 MiB + 4TH", "auto", lambda p: 64 * MIB + 4 * p.tokens * p.hidden, only_cuda=True),
    Own("onchip, an eighth of the logits", "auto", _part_of_logits(8, "recompute"), only_cuda=True),
    Own("onchip, no bound", "auto", lambda p: 1 << 60, only_cuda=True),
    Own("onchip stash", "stash"),
    Own("onchip recompute", "recompute", _part_of_logits(16, "recompute")),
    InFp8("onchip fp8, approximate", before=False),
    InFp8("onchip fp8, approximate, weight quantised before", before=True),
    *(Implementation(peer, _peer_steps) for peer in PEERS),
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


def reference(problem: Problem) -> Reference:
    """The float64 oracle on the CPU, on a GPU (where that would take minutes) the framework's own float64."""
    made = _float64_on_gpu(problem) if problem.hidden.is_cuda else _float64_on_cpu(problem)
    values = dict(zip(("loss", "grad_hidden", "grad_weight"), made, strict=True))
    tokens, hidden, vocab = len(problem.hidden), problem.hidden.shape[1], len(problem.weight)
    lengths = (hidden + vocab, hidden + 2 * vocab, hidden + vocab + tokens)
    plain: Sequence[Tensor] = ()
    if problem.hidden.dtype != torch.float32:
        plain = _steps(problem, lambda h, w, y: F.cross_entropy(F.linear(h, w), y))["forward+backward"]()
    return Reference(values, bounds_of(values, plain, problem.hidden.dtype, lengths, forward=1))


check = Reference.check


def _float64_on_cpu(problem: Problem) -> tuple[Tensor, ...]:
    hidden, weight = (x.detach().float().numpy() for x in (problem.hidden, problem.weight))
    result = oracle(hidden, weight, problem.target.numpy())
    return tuple(torch.from_numpy(x) for x in (result.loss, result.grad_hidden, result.grad_weight))


def _float64_on_gpu(problem: Problem, chunk: int | None = None) -> tuple[Tensor, ...]:
    """A chunk of tokens at a time and by hand: autograd would keep more [chunk, V] arrays than the two of this."""
    weight = problem.weight.detach().double()
    if chunk is None:
        chunk = max(1, (2 << 30) // (8 * len(weight)))  # 2 GiB for each array
    kept = (problem.target != IGNORED).nonzero().squeeze(1)
    loss = weight.new_zeros(())
    grad_hidden = torch.zeros_like(problem.hidden, dtype=torch.float64, requires_grad=False)
    grad_weight = torch.zeros_like(weight)
    for tokens in kept.split(chunk):
        hidden, target = problem.hidden.detach()[tokens].double(), problem.target[tokens, None]
        logits = hidden @ weight.T
        lse = logits.logsumexp(1, keepdim=True)
        loss += (lse - logits.gather(1, target)).sum()
        grad_logits = logits.sub_(lse).exp_()
        grad_logits.scatter_add_(1, target, torch.full_like(lse, -1.0))
        grad_hidden[tokens] = grad_logits @ weight
        grad_weight.addmm_(grad_logits.T, hidden)
    return tuple(x.div_(len(kept)) for x in (loss, grad_hidden, grad_weight))
