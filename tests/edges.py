"""A small call of every op in PyTorch, on one process: what test_edges.py holds all of them to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

import onchip.torch as ops
from float64 import TOKENS, as_torch, differentiable, examples
from onchip.torch import TopK

HIDDEN, WIDE = 8, 6


@dataclass(frozen=True)
class Call:
    """An op with its tensors: `leaves` have gradients, those among `options` have none."""

    run: Callable
    """Of leaves and options by name: what the op returns."""
    leaves: dict
    options: dict = field(default_factory=dict)

    def prepare(self, device="cpu"):
        """The leaves and the options as tensors on a device, each call of it new ones."""
        leaves = {name: moved(x, device).requires_grad_() for name, x in self.leaves.items()}
        return leaves, {name: moved(x, device) for name, x in self.options.items()}

    def outputs(self, leaves, options):
        """The outputs that have gradients."""
        made = differentiable(self.run(**leaves, **options))
        return list(made) if isinstance(made, tuple) else [made]

    def loss(self, leaves, options):
        return sum(x.sum() for x in self.outputs(leaves, options))

    def gradients(self, leaves, options):
        """The outputs and, of their sum, the gradients."""
        made = self.outputs(leaves, options)
        return made, list(torch.autograd.grad(sum(x.sum() for x in made), list(leaves.values())))


def moved(x, device):
    """A copy on a device, of a tensor, an array or a `TopK` of them."""
    x = as_torch(x)
    if isinstance(x, TopK):
        return TopK(*(moved(y, device) for y in x))
    return x.detach().clone().to(device) if isinstance(x, Tensor) else x


def quantised(x, weight, bias):
    return ops.fp8_linear(ops.quantize_activation(x), ops.quantize_weight(weight), bias)


def quantised_head(hidden, weight, target):
    return ops.linear_cross_entropy(hidden, ops.quantize_weight(weight), target, precision="fp8")


class Layers:
    """Modules, made once and called with the tensors that are given."""

    moe = ops.MoE(HIDDEN, WIDE, 3, 2, num_shared=1, bias=True).double()
    head = ops.LMHead(HIDDEN, 7, bias=True).double()
    fp8 = ops.Fp8Linear(HIDDEN, WIDE)


def of_module(module, *names):
    """A call of it: its parameters are leaves, and what `names` says is passed in their order."""
    parameters = dict(module.named_parameters())

    def run(**given):
        own = {name: given[name.replace(".", "_")] for name in parameters}
        return functional_call(module, own, tuple(given[name] for name in names), tie_weights=False)

    return run, {name.replace(".", "_"): x.detach() for name, x in parameters.items()}


def lm_loss(hidden, weight, labels, **options):
    return functional_call(LOSS, {"head.weight": weight}, (hidden, labels), options)


class _Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(HIDDEN, 7, bias=False, device="meta")

    def forward(self, hidden, labels, **options):
        return ops.lm_loss(self.head, hidden, labels, **options)


LOSS = _Loss()


def calls(group):
    """By name."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=torch.float64):
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)

    made = {name: Call(getattr(ops, x.op), x.leaves, x.options) for name, x in examples("target").items()}
    target = torch.tensor([[0, 3, -100, 6, 2]])
    hidden = {"hidden": normal(1, TOKENS, HIDDEN), "weight": normal(7, HIDDEN)}
    logits = {"logits": normal(1, TOKENS, 7)}
    shifted = {"target": target, "shift": True, "normalizer": 3, "return_stats": True}
    loss_of = lambda op: lambda **given: op(**given)[0]  # noqa: E731
    made["linear_cross_entropy shift"] = Call(loss_of(ops.linear_cross_entropy), hidden, shifted)
    made["cross_entropy shift"] = Call(loss_of(ops.cross_entropy), logits, shifted)
    made["cross_entropy mean"] = Call(ops.cross_entropy, logits, {"target": target})
    made["linear_cross_entropy mean"] = Call(ops.linear_cross_entropy, hidden, {"target": target})
    more = {"ids": target, "top1": True, "mean_logits": True, "log_sum_sq_probs": True, "lse": True}
    made["linear_log_probs more"] = Call(ops.linear_log_probs, hidden, more | {"shift": True, "entropy": True})
    made["log_probs more"] = Call(ops.log_probs, logits, more | {"entropy": True})
    made["jsd mean"] = Call(ops.jsd, {"student_logits": logits["logits"]}, {"teacher_logits": normal(1, TOKENS, 7)})
    made["lm_loss"] = Call(lm_loss, hidden, {"labels": target})
    run, parameters = of_module(Layers.head, "hidden", "labels")
    made["LMHead"] = Call(run, parameters | {"hidden": hidden["hidden"]}, {"labels": target})
    fp8 = {"hidden": normal(TOKENS, HIDDEN, dtype=torch.float32), "weight": normal(7, HIDDEN, dtype=torch.float32)}
    made["linear_cross_entropy fp8"] = Call(
        partial(ops.linear_cross_entropy, precision="fp8"), fp8, {"target": target[0]}
    )
    made["linear_cross_entropy quantised"] = Call(quantised_head, fp8, {"target": target[0]})
    made["linear_cross_entropy fp8 soft"] = Call(
        partial(ops.linear_cross_entropy, precision="fp8"), fp8,
        {"target": TopK(target.clamp(0)[0][:, None], torch.full((TOKENS, 1), 0.7), "probs", "truncated")},
    )  # fmt: skip
    layer = {"x": normal(TOKENS, HIDDEN), "weight": normal(WIDE, HIDDEN), "bias": normal(WIDE)}
    single = {name: x.float() for name, x in layer.items()}
    made["fp8_linear"] = Call(ops.fp8_linear, single)
    made["fp8_linear quantised"] = Call(quantised, single)
    run, parameters = of_module(Layers.fp8, "x")
    made["Fp8Linear"] = Call(run, parameters | {"x": single["x"]})
    grouped = {"x": normal(9, HIDDEN), "weight": normal(3, 2 * WIDE, HIDDEN)}
    sizes = {"group_sizes": torch.tensor([4, 0, 3])}
    made["grouped_matmul"] = Call(ops.grouped_matmul, grouped, sizes)
    scaled = grouped | {"bias": normal(3, 2 * WIDE), "row_scale": normal(9)}
    made["grouped_matmul swiglu"] = Call(ops.grouped_matmul, scaled, sizes | {"activation": "swiglu"})
    moved_rows = {"rows": torch.tensor([3, 3, 0, 8, 7, 1, 2, 0, 0]), "scatter_rows": torch.arange(9) % 4}
    made["grouped_matmul rows"] = Call(ops.grouped_matmul, scaled, sizes | moved_rows | {"num_rows": 5})
    made["grouped_matmul fp8"] = Call(
        ops.grouped_matmul, {name: x.float() for name, x in grouped.items()}, sizes | {"precision": "fp8"}
    )
    run, parameters = of_module(Layers.moe, "x")
    made["MoE"] = Call(run, parameters | {"x": layer["x"]})
    for precision, given in (("full", layer), ("fp8", single)):
        how = {"group": group, "precision": precision}
        made[f"matmul_reduce_scatter {precision}"] = Call(ops.matmul_reduce_scatter, given, how)
        gathered = {"x_shard" if name == "x" else name: x for name, x in given.items()}
        made[f"all_gather_matmul {precision}"] = Call(ops.all_gather_matmul, gathered, how)
    for name in ("linear_cross_entropy mean", "linear_cross_entropy shift", "cross_entropy mean", "cross_entropy dense",
                 "cross_entropy top-k", "linear_cross_entropy dense", "linear_cross_entropy top-k", "linear_log_probs",
                 "linear_log_probs more", "log_probs", "log_probs more", "linear_jsd beta=0.3", "linear_jsd top-k",
                 "jsd", "linear_cross_entropy fp8"):  # fmt: skip
        sharded = made[name]
        made[f"{name} of shards"] = Call(sharded.run, sharded.leaves, sharded.options | {"vocab_group": group})
    for name, call in list(made.items()):
        if call.run not in (quantised, quantised_head, lm_loss):
            checked = Call(call.run, call.leaves, call.options | {"check_inputs": True})
            made[f"{name} checked"] = checked
    return made
