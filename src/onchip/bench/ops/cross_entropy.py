"""What `onchip bench` needs to know of this op: the names that `onchip.bench.harness.Op` lists, and no more.

Bench cases are plain: mean over the tokens that are not ignored, no options; so every peer can run them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.bench.ops.cross_entropy_peers import IN_PLACE, OWN, PEERS, Loss
from onchip.bench.peers import Implementation, Peer
from onchip.bench.torch_steps import Reference, Step, bounds_of, gradient_step
from onchip.core.sizes import DTYPE_BYTES
from onchip.ops.cross_entropy import cases

CASES = cases.BENCH_CASES
DEFAULT_CASES = cases.DEFAULT_BENCH_CASES
DTYPES = tuple(DTYPE_BYTES)

IGNORED = -100  # the ignore_index that all implementations have by default


@dataclass(frozen=True)
class Problem:
    """Inputs of one case, in the dtype and on the device of the run."""

    logits: Tensor  # [T, V], a leaf that requires grad; of wider rows, where the case is sliced
    target: Tensor  # [T]


def make_problem(case: cases.Case, device: str, dtype: str) -> Problem:
    """The inputs of `case` as tensors, drawn on the device."""
    assert not case.options
    rng = torch.Generator(device).manual_seed(0)
    shape = (case.tokens, case.vocab + case.sliced)
    # In the dtype of the run at once: in float32 they could be more than the device holds.
    logits = torch.randn(shape, generator=rng, device=device, dtype=getattr(torch, dtype))
    logits.mul_(case.logit_std).add_(case.logit_offset)
    if case.zipf:
        rank = torch.arange(1, case.vocab + 1, device=device)
        target = torch.multinomial(1 / rank, case.tokens, replacement=True, generator=rng)
    else:
        target = torch.randint(case.vocab, (case.tokens,), generator=rng, device=device)
    shuffled = torch.randperm(case.tokens, generator=rng, device=device)
    target[shuffled[: round(case.ignored * case.tokens)]] = IGNORED
    return Problem(logits[:, : case.vocab].detach().requires_grad_(), target)


class _Given(torch.autograd.Function):
    """Memory as a layer's output would be: neither a leaf nor a view."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, memory: Tensor) -> Tensor:
        out = memory.new_empty(0)
        return out.set_(memory.untyped_storage(), memory.storage_offset(), memory.shape, memory.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


class _InPlace:
    """A step of 'forward+backward' that writes its gradient over its logits, a copy of the problem's.

    What it finds there from the second run on is the gradient of the run before: the time depends on no value.
    """

    def __init__(self, problem: Problem, loss: Loss) -> None:
        self.problem, self.loss = problem, loss
        self.memory: Tensor | None = None
        self.anchor = torch.empty(0, requires_grad=True)

    def __call__(self) -> Sequence[Tensor]:
        first = self.memory is None
        if self.memory is None:
            logits = self.problem.logits.detach()
            whole = logits.new_empty(logits.shape[0], logits.stride(0))
            self.memory = whole[:, : logits.shape[1]].copy_(logits)
        logits = _Given.apply(self.anchor, self.memory)
        loss = self.loss(logits, self.problem.target)
        (gradient,) = torch.autograd.grad(loss, logits)
        # To be checked at first; then its memory is not the step's.
        return [loss.detach(), gradient] if first else [loss.detach()]


def _steps(problem: Problem, peer: Peer) -> dict[str, Step]:
    loss = peer.load()

    def forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return [loss(problem.logits.detach(), problem.target)]

    if peer.config.get(IN_PLACE):
        return {"forward": forward, "forward+backward": _InPlace(problem, loss)}
    both = gradient_step(lambda: loss(problem.logits, problem.target), [problem.logits])
    return {"forward": forward, "forward+backward": both}


IMPLEMENTATIONS = tuple(Implementation(peer, _steps) for peer in (*OWN, *PEERS))


def floor(problem: Problem, mode: str) -> Step:
    """A copy that moves the same bytes: the logits read once, and in 'forward+backward' written once too."""
    logits = problem.logits.detach()
    if mode == "forward":  # half of them read, and as much written
        logits = logits[: (len(logits) + 1) // 2]
    out = torch.empty_like(logits)
    return lambda: [out.copy_(logits)]


def reference(problem: Problem) -> Reference:
    """In the framework's float64, a chunk of rows at a time; the gradient is kept in float32 beside 16-bit logits."""
    logits, target = problem.logits.detach(), problem.target
    tokens, vocab = logits.shape
    kept = (target != IGNORED).nonzero().squeeze(1)
    loss = torch.zeros((), dtype=torch.float64, device=logits.device)
    wide = torch.float64 if logits.dtype == torch.float32 else torch.float32
    gradient = torch.zeros(tokens, vocab, dtype=wide, device=logits.device)
    for rows in kept.split(max(1, (1 << 30) // (8 * vocab))):  # 1 GiB for each array
        log_p = logits[rows].double().log_softmax(1)
        own = target[rows, None]
        loss -= log_p.gather(1, own).sum()
        gradient[rows] = log_p.exp_().scatter_add_(1, own, torch.full_like(own, -1, dtype=torch.float64)).to(wide)
    count = max(1, len(kept))
    values = {"loss": loss / count, "grad_logits": gradient.div_(count)}
    plain: Sequence[Tensor] = ()
    if logits.dtype != torch.float32:
        plain = gradient_step(lambda: F.cross_entropy(problem.logits, target), [problem.logits])()
    return Reference(values, bounds_of(values, plain, logits.dtype, (vocab + tokens, 2 * vocab), forward=1))


check = Reference.check
