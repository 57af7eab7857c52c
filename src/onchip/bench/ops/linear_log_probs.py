"""What `onchip bench` needs to know of this op: the names that `onchip.bench.harness.Op` lists, and no more.

A loss is made of what is returned, so that backward has one: the mean of the log-probabilities, and of the entropies
where the case asks for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip.bench.ops.linear_log_probs_peers import OWN, PEERS, Values
from onchip.bench.peers import Implementation, Peer
from onchip.bench.torch_steps import Reference, Step, bounds_of
from onchip.core.sizes import DTYPE_BYTES
from onchip.ops.linear_log_probs import cases

CASES = cases.BENCH_CASES
DEFAULT_CASES = cases.DEFAULT_BENCH_CASES
DTYPES = tuple(DTYPE_BYTES)


@dataclass(frozen=True)
class Problem:
    """Inputs of one case, in the dtype and on the device of the run."""

    hidden: Tensor  # [T, H], a leaf that requires grad
    weight: Tensor  # [V, H], a leaf that requires grad
    ids: Tensor  # [T]
    entropy: bool


def make_problem(case: cases.Case, device: str, dtype: str) -> Problem:
    """The inputs of `case` as tensors, drawn on the device."""
    rng = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(case.tokens, case.hidden, generator=rng, device=device)
    weight = torch.randn(case.vocab, case.hidden, generator=rng, device=device).mul_(case.logit_std / case.hidden**0.5)
    ids = torch.randint(case.vocab, (case.tokens,), generator=rng, device=device)
    hidden, weight = (x.to(getattr(torch, dtype)).requires_grad_() for x in (hidden, weight))
    return Problem(hidden, weight, ids, bool(case.options.get("entropy")))


def _steps(problem: Problem, peer: Peer) -> dict[str, Step]:
    values: Values = peer.load()
    h, w, ids, entropy = problem.hidden, problem.weight, problem.ids, problem.entropy

    def forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return [x for x in values(h.detach(), w.detach(), ids, entropy) if x is not None]

    def both() -> Sequence[Tensor]:
        made = [x for x in values(h, w, ids, entropy) if x is not None]
        gradients = torch.autograd.grad(sum(x.float().mean() for x in made), (h, w))
        return [*(x.detach() for x in made), *gradients]

    return {"forward": forward, "forward+backward": both}


IMPLEMENTATIONS = tuple(Implementation(peer, _steps) for peer in (*OWN, *PEERS))


def floor(problem: Problem, mode: str) -> Step:
    """The matrix products alone, into buffers that exist already: the logits, then both gradients."""
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    logits = hidden.new_empty(len(hidden), len(weight))
    if mode == "forward":
        return lambda: [torch.mm(hidden, weight.T, out=logits)]
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)
    return lambda: [
        torch.mm(hidden, weight.T, out=logits),
        torch.mm(logits, weight, out=grad_hidden),
        torch.mm(logits.T, hidden, out=grad_weight),
    ]


def reference(problem: Problem) -> Reference:
    """In the framework's float64, a chunk of tokens at a time."""
    hidden, ids = problem.hidden.detach(), problem.ids
    weight = problem.weight.detach().double()
    tokens, vocab = len(hidden), len(weight)
    log_prob, entropy = (torch.zeros(tokens, dtype=torch.float64, device=hidden.device) for _ in range(2))
    grad_hidden = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    grad_weight = torch.zeros_like(weight)
    for rows in torch.arange(tokens, device=hidden.device).split(max(1, (1 << 30) // (8 * vocab))):
        h, own = hidden[rows].double(), ids[rows, None]
        log_p = (h @ weight.T).log_softmax(1)
        p = log_p.exp()
        log_prob[rows] = log_p.gather(1, own)[:, 0]
        g = -p
        g.scatter_add_(1, own, torch.ones_like(own, dtype=torch.float64))
        if problem.entropy:
            entropy[rows] = -(p * log_p).sum(1)
            g -= p * (log_p + entropy[rows, None])
        g /= tokens
        grad_hidden[rows] = g @ weight
        grad_weight.addmm_(g.T, h)
    values: dict[str, Any] = {"log_prob": log_prob}
    if problem.entropy:
        values["entropy"] = entropy
    forward = len(values)
    values |= {"grad_hidden": grad_hidden, "grad_weight": grad_weight}
    size = hidden.shape[1]
    lengths = (*[size + vocab] * forward, size + 2 * vocab, size + vocab + tokens)
    plain: Sequence[Tensor] = ()
    if hidden.dtype != torch.float32:
        plain = _steps(problem, PEERS[0])["forward+backward"]()
    return Reference(values, bounds_of(values, plain, hidden.dtype, lengths, forward=forward), forward)


check = Reference.check
