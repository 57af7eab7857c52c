"""Cross-entropies whose targets are probabilities, all called alike, and the oracle's results for the same numbers."""

import numpy as np
import torch

from losses import VOCAB, assert_near
from onchip.oracle.reference import Linear, Logits
from onchip.oracle.torch import as_array
from onchip.torch import TopK
from soft_oracle import SoftLabels, soft_cross_entropy


def problem(loss, form, shape=(2, 12), vocab=VOCAB, **more):
    """As `Loss.problem`, with a target that has probabilities: of K=4 ids, one of them twice, or of every entry."""
    given = loss.problem(shape, vocab=vocab, **more)
    g = torch.Generator().manual_seed(1)
    if form == "dense":
        probs = torch.rand(*shape, vocab, generator=g)
        return given | {
            "target": (probs / probs.sum(-1, keepdim=True)).to(given["hidden" if loss.linear else "logits"])
        }
    indices, values = torch.randint(vocab, (*shape, 4), generator=g), torch.rand(*shape, 4, generator=g)
    indices[..., 3] = indices[..., 0]
    values = values.log() if form == "log_probs" else values
    return given | {"target": TopK(indices.to(loss.device), values.to(loss.device), form, "truncated")}


def class_weights(vocab, device="cpu"):
    """From 0 on."""
    return torch.linspace(0, 2, vocab, device=device)


def everything(reduction="mean", device="cpu", vocab=VOCAB):
    each = torch.linspace(0.5, 1.5, 24, device=device).reshape(2, 12)
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "logit_scale": 0.5, "temperature": each}
    options["class_weight"] = class_weights(vocab, device)
    options |= {"token_weight": each.flip(0)} | ({"normalizer": 7.0} if reduction == "mean" else {})
    return options


def oracle(loss, given, upstream, **options):
    target = given["target"]
    if isinstance(target, TopK):
        values = as_array(target.values)
        target = SoftLabels(as_array(target.indices), np.exp(values) if target.kind == "log_probs" else values)
    named = given | options | {"grad_loss": upstream, "target": target}
    arrays = {name: as_array(x) if isinstance(x, torch.Tensor) else x for name, x in named.items()}
    names = ("hidden", "weight", "bias") if loss.linear else ("logits",)
    return soft_cross_entropy((Linear if loss.linear else Logits)(*(arrays.pop(x) for x in names)), **arrays)


def right_stats(loss, given, *, softcap=None, logit_scale=1.0, temperature=1.0, **_):
    """What return_stats gives, in float64 from the logits and all probabilities."""
    target, x = given["target"], given["hidden" if loss.linear else "logits"].double()
    z = torch.nn.functional.linear(x, given["weight"].double(), given["bias"].double()) if loss.linear else x
    z = z * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z / (temperature.double()[..., None] if torch.is_tensor(temperature) else temperature)
    likeliest, q = None, target
    if isinstance(target, TopK):
        values = target.values.double().exp() if target.kind == "log_probs" else target.values.double()
        likeliest = target.indices.gather(-1, values.argmax(-1, keepdim=True))[..., 0]
        q = torch.zeros_like(z).scatter_add_(-1, target.indices, values)
    q = q.double()
    log_p = z.log_softmax(-1)
    of = z.argmax(-1)
    return {
        "lse": z.logsumexp(-1), "log_prob": (q * log_p).masked_fill(q == 0, 0).sum(-1),
        "entropy": -(log_p.exp() * log_p).masked_fill(log_p == -torch.inf, 0).sum(-1),
        "correct": of == (q.argmax(-1) if likeliest is None else likeliest), "argmax": of,
        "target_logit": (q * z).masked_fill(q == 0, 0).sum(-1),
    }  # fmt: skip


def assert_right(loss, given, *, scale=1.0, bound=None, **options):
    made = loss.op(**given, **options)
    upstream = (
        torch.linspace(-1, 2, made.numel(), device=made.device)
        .view(made.shape[::-1])
        .permute(tuple(reversed(range(made.ndim))))
    )
    leaves = [name for name, x in given.items() if isinstance(x, torch.Tensor) and x.requires_grad]
    grads = torch.autograd.grad(made, [given[name] for name in leaves], upstream)
    hows = ("scratch_bytes", "backend")
    right = oracle(loss, given, upstream, **{name: x for name, x in options.items() if name not in hows})
    assert_near("loss", made.detach(), torch.from_numpy(right.loss), scale)
    for name, g in zip(leaves, grads, strict=True):
        assert g.dtype == given[name].dtype
        assert_near(f"grad_{name}", g, torch.from_numpy(getattr(right, f"grad_{name}")), scale, bound)
