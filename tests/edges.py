"""A small call of every op in PyTorch, in one process: test_edges.py checks all of them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import onchip.torch as ops
from every_loss import Recorded, check_operator
from float64 import TOKENS, as_torch, differentiable, examples
from onchip.masks import Causal, Documents
from onchip.torch import TopK

HIDDEN, WIDE, VOCAB = 8, 6, 7
SHARDED = {"vocab_group": "all processes"}


@dataclass(frozen=True)
class Call:
    """An op with its tensors: `leaves` have gradients, those among `options` have none."""

    run: Callable
    """Of leaves and options by name: what the op returns."""
    leaves: dict
    options: dict = field(default_factory=dict)

    def prepare(self, device="cpu"):
        """The leaves and the options, new tensors each time."""
        leaves = {name: fresh(x, device).requires_grad_() for name, x in self.leaves.items()}
        return leaves, {name: fresh(x, device) for name, x in self.options.items()}

    def outputs(self, leaves, options):
        """Those that have gradients."""
        given = options | ({"vocab_group": dist.group.WORLD} if "vocab_group" in options else {})
        made = differentiable(self.run(**leaves, **given))
        return list(made) if isinstance(made, tuple) else [made]

    def loss(self, leaves, options):
        return sum(x.sum() for x in self.outputs(leaves, options))

    def gradients(self, leaves, options):
        """The outputs, and the gradients of their sum by the leaves that need one."""
        made, needs = self.outputs(leaves, options), [x for x in leaves.values() if x.requires_grad]
        return [*made, *torch.autograd.grad(sum(x.sum() for x in made), needs)]

    @property
    def product(self):
        """The multiplications and additions of one matrix product, for all layers that it has."""
        if "q" in self.leaves:
            q, k, v = (self.leaves[name] for name in "qkv")
            return 2 * q[..., 0].numel() * k.shape[1] * (q.shape[-1] + v.shape[-1])
        flops = 0
        for who in ("", "student_", "teacher_", "head_"):
            weight = self.leaves.get(f"{who}weight")
            x = next((self.leaves[y] for y in (f"{who}hidden", "hidden", "x", "x_shard") if y in self.leaves), None)
            if weight is None:
                continue
            tokens = len(self.options["rows"]) if "rows" in self.options else x[..., 0].numel()
            flops += 2 * tokens * weight[0].numel() if weight.ndim == 3 else 2 * tokens * weight.numel()
        return flops


def fresh(x, device):
    """A copy on a device, of a tensor, an array or a `TopK` of them; options as they are."""
    x = as_torch(x)
    if isinstance(x, TopK):
        return TopK(*(fresh(y, device) for y in x))
    return x.detach().clone().to(device) if isinstance(x, Tensor) else x


def quantised(x, weight, bias):
    return ops.fp8_linear(ops.quantize_activation(x), ops.quantize_weight(weight), bias)


def quantised_head(hidden, weight, target):
    return ops.linear_cross_entropy(hidden, ops.quantize_weight(weight), target, precision="fp8")


def attended(ids, **given):
    return ops.attention(mask=Documents(ids) & Causal(), softcap=3.0, return_lse=True, **given)


def first_of(op, **given):
    return op(**given)[0]


class OfHead(nn.Module):
    """A model that calls `lm_loss`."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, hidden, labels):
        return ops.lm_loss(self.head, hidden, labels)


def of_module(module, *names, **more):
    """A call of a module: its parameters are leaves too, and `names` what is passed in this order."""
    parameters = {name.replace(".", "_"): (name, x.detach()) for name, x in module.named_parameters()}

    def run(**given):
        own = {name: given[key] for key, (name, _) in parameters.items()}
        return functional_call(module, own, tuple(given[name] for name in names))

    leaves = {key: x for key, (_, x) in parameters.items()}
    return Call(run, leaves | {x: more[x] for x in names[:1]}, {x: more[x] for x in names[1:]})


def calls():
    """By name."""
    made = {name: Call(getattr(ops, x.op), x.leaves, x.options) for name, x in examples("target").items()}
    rng = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    def single(call):
        return replace(call, leaves={name: as_torch(x).float() for name, x in call.leaves.items()})

    target = torch.tensor([[0, 3, -100, 6, 2]])
    labels = {"target": target}
    soft = {"target": TopK(target.clamp(0)[..., None], torch.full((1, TOKENS, 1), 0.7), "probs", "truncated")}
    layer = {"hidden": normal(1, TOKENS, HIDDEN), "weight": normal(VOCAB, HIDDEN)}
    logits = {"logits": normal(1, TOKENS, VOCAB)}
    student = {"student_logits": logits["logits"]}
    shifted = labels | {"shift": True, "normalizer": 3, "return_stats": True}
    stats = dict.fromkeys(("top1", "mean_logits", "log_sum_sq_probs", "lse", "entropy"), True) | {"ids": target}
    # What most callers ask for, without options.
    made |= {
        "linear_cross_entropy": Call(ops.linear_cross_entropy, layer, labels),
        "linear_cross_entropy shift": Call(partial(first_of, ops.linear_cross_entropy), layer, shifted),
        "cross_entropy": Call(ops.cross_entropy, logits, labels),
        "cross_entropy shift": Call(partial(first_of, ops.cross_entropy), logits, shifted),
        "linear_log_probs statistics": Call(ops.linear_log_probs, layer, stats | {"shift": True}),
        "log_probs statistics": Call(ops.log_probs, logits, stats),
        "jsd of one teacher": Call(ops.jsd, student, {"teacher_logits": normal(1, TOKENS, VOCAB)}),
        "linear_jsd of each token": replace(
            made["linear_jsd beta=0.3"], options=made["linear_jsd beta=0.3"].options | {"reduction": "none"}
        ),
        "jsd top-k": Call(ops.jsd, {"student_logits": made["jsd"].leaves["student_logits"]},
                          made["linear_jsd top-k"].options),
        "lm_loss": of_module(OfHead().double(), "hidden", "labels", hidden=layer["hidden"], labels=target),
        "LMHead": of_module(ops.LMHead(HIDDEN, VOCAB).double(), "hidden", "labels", hidden=layer["hidden"],
                            labels=target),
    }  # fmt: skip
    fp8 = partial(ops.linear_cross_entropy, precision="fp8")
    made |= {
        "linear_cross_entropy fp8": single(Call(fp8, layer, labels)),
        "linear_cross_entropy quantised": single(Call(quantised_head, layer, labels)),
        "linear_cross_entropy fp8 top-k": single(Call(fp8, layer, soft)),
        "linear_cross_entropy fp8 dense": single(Call(fp8, layer, {"target": torch.full((1, TOKENS, VOCAB), 0.1)})),
    }
    plain = {"x": normal(TOKENS, HIDDEN), "weight": normal(WIDE, HIDDEN), "bias": normal(WIDE)}
    made |= {
        "fp8_linear": single(Call(ops.fp8_linear, plain)),
        "fp8_linear quantised": single(Call(quantised, plain)),
        "Fp8Linear": single(of_module(ops.Fp8Linear(HIDDEN, WIDE), "x", x=plain["x"])),
    }
    grouped = {"x": normal(9, HIDDEN), "weight": normal(3, 2 * WIDE, HIDDEN)}
    scaled = grouped | {"bias": normal(3, 2 * WIDE), "row_scale": normal(9)}
    sizes = {"group_sizes": torch.tensor([4, 0, 3])}
    rows = {"rows": torch.tensor([3, 3, 0, 8, 7, 1, 2, 0, 0]), "scatter_rows": torch.arange(9) % 4, "num_rows": 5}
    made |= {
        "grouped_matmul": Call(ops.grouped_matmul, grouped, sizes),
        "grouped_matmul swiglu": Call(ops.grouped_matmul, scaled, sizes | {"activation": "swiglu"}),
        "grouped_matmul rows": Call(ops.grouped_matmul, scaled, sizes | rows),
        "grouped_matmul fp8": single(Call(ops.grouped_matmul, grouped, sizes | {"precision": "fp8"})),
        "MoE": of_module(ops.MoE(HIDDEN, WIDE, 3, 2, num_shared=1, bias=True).double(), "x", x=plain["x"]),
    }
    heads = {"q": normal(2, 5, 4, 3), "k": normal(2, 5, 2, 3), "v": normal(2, 5, 2, 6)}
    made |= {
        "attention": Call(ops.attention, heads),
        "attention sinks": Call(attended, heads | {"sinks": normal(4)}, {"ids": torch.tensor([0, 0, 1, 1, 1])}),
    }
    for op, x in ((ops.all_gather_matmul, "x_shard"), (ops.matmul_reduce_scatter, "x")):
        call = Call(op, {x if name == "x" else name: y for name, y in plain.items()}, {"group": None})
        made[op.__name__] = call
        made[f"{op.__name__} fp8"] = single(replace(call, options=call.options | {"precision": "fp8"}))
    for name in ("linear_cross_entropy", "linear_cross_entropy dense", "linear_cross_entropy top-k",
                 "linear_cross_entropy fp8", "cross_entropy", "cross_entropy dense", "cross_entropy top-k",
                 "linear_log_probs", "linear_log_probs statistics", "log_probs", "log_probs statistics",
                 "linear_jsd beta=0.3", "linear_jsd top-k", "jsd", "jsd top-k"):  # fmt: skip
        made[f"{name} of shards"] = replace(made[name], options=made[name].options | SHARDED)
    return {
        name: replace(call, leaves={key: as_torch(x) for key, x in call.leaves.items()}) for name, call in made.items()
    }


CALLS = calls()

# What the Triton kernels run, and the operator that runs it there, with its backward.
BY_KERNELS = {
    "cross_entropy": "cross_entropy_by_rows",
    "cross_entropy dense": "cross_entropy_by_rows",
    "cross_entropy of shards": "cross_entropy_by_rows",
    "cross_entropy top-k": "cross_entropy_by_rows",
    "cross_entropy top-k of shards": "cross_entropy_by_rows",
    "grouped_matmul swiglu": "grouped_matmul",
    "jsd": "jsd_by_triton",
    "linear_cross_entropy": "linear_cross_entropy_by_triton",
    "linear_cross_entropy dense": "linear_cross_entropy_by_triton",
    "linear_cross_entropy of shards": "linear_cross_entropy_by_triton",
    "linear_cross_entropy top-k": "linear_cross_entropy_by_triton",
    "linear_cross_entropy top-k of shards": "linear_cross_entropy_by_triton",
    "linear_jsd beta=0.3": "jsd_by_triton",
    "linear_jsd beta=0.3 of shards": "jsd_by_triton",
    "linear_log_probs": "linear_log_probs_by_triton",
    "linear_log_probs of shards": "linear_log_probs_by_triton",
    "log_probs": "log_probs_by_rows",
    "log_probs of shards": "log_probs_by_rows",
}


def by_kernels(name):
    """The call, as the Triton kernels run it: in float16."""
    call = CALLS[name]

    def narrow(x):
        x = as_torch(x)
        if isinstance(x, TopK):
            return TopK(*map(narrow, x))
        return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x

    options = {key: narrow(x) for key, x in call.options.items()} | {"backend": "triton"}
    return replace(call, leaves={key: x.half() for key, x in call.leaves.items()}, options=options)


def check_kernels(name, device):
    """What opcheck asks of the operator and its backward."""
    call, known = by_kernels(name), BY_KERNELS[name]
    with Recorded() as seen:
        call.gradients(*call.prepare(device))
    assert {x.name() for x, _ in seen.calls} == {f"onchip::{known}", f"onchip::{known}_backward"}
    for operator, arguments in seen.calls:
        check_operator(operator, arguments)
