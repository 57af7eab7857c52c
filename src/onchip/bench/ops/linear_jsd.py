"""What `onchip bench` needs to know of this op: the names that `onchip.bench.harness.Op` lists, and no more.

Bench cases are plain: mean over all tokens, temperature 1, a teacher that is a constant; so every peer can run them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.bench.ops.linear_jsd_peers import OWN, PEERS
from onchip.bench.peers import Implementation, Peer
from onchip.bench.torch_steps import Reference, Step, bounds_of, gradient_step
from onchip.core.sizes import DTYPE_BYTES
from onchip.ops.linear_jsd import cases

CASES = cases.BENCH_CASES
DEFAULT_CASES = cases.DEFAULT_BENCH_CASES
DTYPES = tuple(DTYPE_BYTES)


@dataclass(frozen=True)
class Problem:
    """Inputs of one case, in the dtype and on the device of the run."""

    hidden: Tensor  # [T, Hs], a leaf that requires grad
    weight: Tensor  # [V, Hs], a leaf that requires grad
    teacher_hidden: Tensor  # [T, Ht]
    teacher_weight: Tensor  # [V, Ht]
    beta: float


def make_problem(case: cases.Case, device: str, dtype: str) -> Problem:
    """The inputs of `case` as tensors, drawn on the device: two models of their own."""
    rng = torch.Generator(device).manual_seed(0)

    def head(size: int) -> list[Tensor]:
        h = torch.randn(case.tokens, size, generator=rng, device=device)
        w = torch.randn(case.vocab, size, generator=rng, device=device).mul_(case.logit_std / size**0.5)
        return [x.to(getattr(torch, dtype)) for x in (h, w)]

    hidden, weight = (x.requires_grad_() for x in head(case.hidden))
    teacher_hidden, teacher_weight = head(case.teacher_hidden or case.hidden)
    return Problem(hidden, weight, teacher_hidden, teacher_weight, float(case.options.get("beta", 0.5)))


def _steps(problem: Problem, peer: Peer) -> dict[str, Step]:
    loss = peer.load()
    h, w, teacher = problem.hidden, problem.weight, (problem.teacher_hidden, problem.teacher_weight)

    def forward() -> Sequence[Tensor]:
        # Detached as well: some functions look at requires_grad alone and would compute gradients.
        with torch.no_grad():
            return [loss(h.detach(), w.detach(), *teacher, problem.beta)]

    both = gradient_step(lambda: loss(h, w, *teacher, problem.beta), [h, w])
    return {"forward": forward, "forward+backward": both}


IMPLEMENTATIONS = tuple(Implementation(peer, _steps) for peer in (*OWN, *PEERS))


def floor(problem: Problem, mode: str) -> Step:
    """The matrix products alone, into buffers that exist already: both models' logits, then the student's gradients."""
    h, w, x, v = problem.hidden.detach(), problem.weight.detach(), problem.teacher_hidden, problem.teacher_weight
    z, u = h.new_empty(len(h), len(w)), h.new_empty(len(h), len(w))
    if mode == "forward":
        return lambda: [torch.mm(h, w.T, out=z), torch.mm(x, v.T, out=u)]
    grad_hidden, grad_weight = torch.empty_like(h), torch.empty_like(w)
    return lambda: [
        torch.mm(h, w.T, out=z),
        torch.mm(x, v.T, out=u),
        torch.mm(z, w, out=grad_hidden),
        torch.mm(z.T, h, out=grad_weight),
    ]


def reference(problem: Problem) -> Reference:
    """In the framework's float64, a chunk of tokens at a time, by autograd through the definition."""
    tokens, vocab, size = len(problem.hidden), len(problem.weight), problem.hidden.shape[1]
    weight, teacher_weight = problem.weight.detach().double(), problem.teacher_weight.double()
    loss = weight.new_zeros(())
    grad_hidden, grad_weight = weight.new_zeros(problem.hidden.shape), torch.zeros_like(weight)
    for rows in torch.arange(tokens, device=weight.device).split(max(1, (1 << 29) // (8 * vocab))):
        h = problem.hidden.detach()[rows].double()
        z = (h @ weight.T).requires_grad_()
        u = problem.teacher_hidden[rows].double() @ teacher_weight.T
        with torch.enable_grad():
            value = _definition(z.log_softmax(1), u.log_softmax(1), problem.beta) / tokens
        (g,) = torch.autograd.grad(value, z)
        loss += value.detach()
        grad_hidden[rows] = g @ weight
        grad_weight.addmm_(g.T, h)
    values = {"loss": loss, "grad_hidden": grad_hidden, "grad_weight": grad_weight}
    lengths = (size + vocab, size + 2 * vocab, size + vocab + tokens)
    plain: Sequence[Tensor] = ()
    if problem.hidden.dtype != torch.float32:
        plain = _steps(problem, PEERS[0])["forward+backward"]()
    return Reference(values, bounds_of(values, plain, problem.hidden.dtype, lengths, forward=1))


def _definition(ls: Tensor, lt: Tensor, beta: float) -> Tensor:
    """The sum over rows of the divergence of log-probabilities."""
    s, t = ls.exp(), lt.exp()
    if beta in (0.0, 1.0):
        return (t * (lt - ls)).sum() if beta == 0 else (s * (ls - lt)).sum()
    lm = ((1 - beta) * s + beta * t).log()
    return ((1 - beta) * s * (ls - lm) + beta * t * (lt - lm)).sum()


check = Reference.check
