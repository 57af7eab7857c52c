"""The losses' documented memory formulas compared with measured peaks: of the process, and on a GPU of its memory."""

from functools import partial

import pytest
import torch

from losses import CE, LCE, LLP, LP
from onchip.bench.torch_steps import peak_extra_bytes
from onchip.core.sizes import MIB
from onchip.ops.cross_entropy import may_overlap
from onchip.oracle.torch import computed
from onchip.torch import quantize_weight
from onchip.vocab import memory
from onchip.vocab.fp8 import memory as fp8_memory
from onchip.vocab.memory import Problem
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.triton import memory as triton_memory
from onchip.vocab.triton import planner as triton_planner

# What matrix products and the allocator take beyond the formula.
SLACK = {"cpu": 6 * MIB, "cuda": MIB}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def step_of(p, backend, budget, *, strategy="auto", inplace=False, strided=False, **options):
    """A function that runs the op on random inputs of a problem, forward and backward."""
    device = p.device
    rows = isinstance(p, row_memory.RowsProblem)

    def leaf(dtype, need, *shape):
        return torch.randn(shape, device=device).to(DTYPES[dtype]).requires_grad_(need)

    if rows:
        given = {"logits": leaf(p.dtype, p.grad, 2, p.tokens // 2, p.vocab)}
        if strided:  # leading dimensions that can't be flattened
            x = given["logits"].detach()
            given["logits"] = torch.cat([x, x[:, :1]], 1)[:, :-1].requires_grad_(p.grad)
        y = torch.randint(p.vocab, (2, p.tokens // 2, *((p.ids,) if p.ids else ())), device=device)
    else:
        given = {
            "hidden": leaf(p.hidden_dtype, p.grad_hidden, p.tokens, p.hidden),
            "weight": leaf(p.weight_dtype, p.grad_weight, p.vocab, p.hidden),
        }
        if strided:
            given["hidden"] = torch.randn(2, p.tokens // 2 + 1, p.hidden)[:, :-1].requires_grad_()
        if (p.copied and not strided) or "turned" in options:
            options.pop("turned", None)
            given["weight"] = given["weight"].detach().T.contiguous().T.requires_grad_(p.grad_weight)
        if p.grad_bias:
            given["bias"] = leaf(p.weight_dtype, True, p.vocab)
        y = torch.randint(p.vocab, (*given["hidden"].shape[:-1], *((p.ids,) if p.ids else ())), device=device)
    if getattr(p, "compacted", False) or (rows and p.gathered and not strided):
        y[..., ::8] = -100
    op = (LP.op if p.ids else CE.op) if rows else LLP.op if p.ids else LCE.op
    if p.labels:
        y = torch.rand(*y.shape, p.vocab, device=device).to(DTYPES[p.labels])
        strategy = "forward"
    leaves = [x for x in given.values() if x.requires_grad]
    options |= {} if budget is None else {"scratch_bytes": budget}
    options |= {"softcap": 10.0} if p.softcap else {}
    options |= {"strategy": strategy} if op is LCE.op and strategy != "forward" else {}
    if p.ids:
        more = dict.fromkeys(("mean_logits", "log_sum_sq_probs"), p.more_stats > 0)
        options |= {"lse": True, "entropy": p.stats, **more}
    else:
        options["return_stats"] = p.stats
        options |= {"label_smoothing": 0.1} if getattr(p, "smoothing", False) else {}
        options |= {"reduction": "none"} if getattr(p, "per_token_loss", False) else {}
        options |= {"class_weight": torch.rand(p.vocab, device=device)} if p.class_weight else {}
    if getattr(p, "weight_grad_out", False):
        options["weight_grad_out"] = torch.zeros(p.vocab, p.hidden, device=device)
    cast = not rows and p.dtype != p.hidden_dtype

    def step():
        used = given | ({"logits": computed(given["logits"])} if inplace else {})
        more = {"inplace_backward": True} if inplace else {}
        with torch.autocast(device, DTYPES[p.dtype], enabled=cast):
            made = op(**used, **({"ids": y} if p.ids else {"target": y}), **options, **more, backend=backend)
        outputs = [made] if isinstance(made, torch.Tensor) else [x for x in made if x is not None]
        if not p.ids and p.stats:
            outputs = [outputs[0], *outputs[1]]
        if not leaves:
            return outputs
        differentiable = [x for x in outputs if x.requires_grad]
        wanted = [used["logits"]] if inplace else leaves
        grads = torch.autograd.grad(
            differentiable, wanted, [torch.ones_like(x) for x in differentiable], allow_unused=True
        )
        return [*outputs, *(g for g in grads if g is not None)]

    return step


def assert_held(step, formula, device):
    step()
    peak = peak_extra_bytes(step, device=device)
    assert peak <= formula + SLACK[device], (peak / MIB, formula / MIB)
    assert peak >= formula / 2 - SLACK[device], (
        "the formula promises far more than is used",
        peak / MIB,
        formula / MIB,
    )


# -------------------------------------------------------------------------------------------------------------- the CPU


NO_GRADS = {"grad_hidden": False, "grad_weight": False}
LINEAR = [
    ("stash", {}),
    ("stash", {"softcap": True}),
    ("stash", {"dtype": "bfloat16", "compacted": True}),
    ("recompute", {"dtype": "bfloat16"}),
    ("recompute", {"compacted": True}),
    ("forward", NO_GRADS),
    ("forward", {"smoothing": 0.1, "class_weight": True} | NO_GRADS),
    ("recompute", {"ids": 1, "stats": True, "softcap": True}),
    ("recompute", {"ids": 16, "compacted": True, "dtype": "bfloat16"}),
    ("forward", {"ids": 1, "stats": True} | NO_GRADS),
    ("forward", {"ids": 1, "more_stats": 2} | NO_GRADS),
    ("stash", {"labels": "bfloat16", "dtype": "bfloat16"}),
    ("stash", {"dtype": "float64"}),
    ("recompute", {"ids": 2, "stats": True, "compacted": True, "dtype": "float64"}),
]


@pytest.mark.parametrize(("strategy", "changes"), LINEAR, ids=str)
def test_linear_losses(strategy, changes):
    p = Problem(1024, 64, 8192, **changes)
    budget = memory.scratch_at_least(p, strategy) + 16 * MIB
    formula = memory.scratch_bytes(p, memory.plan(p, strategy, budget))
    assert formula <= budget
    assert_held(step_of(p, "plain", budget, strategy=strategy), formula, "cpu")


def test_a_copy_of_hidden_states_that_cannot_be_flattened_counts():
    p = Problem(8192, 512, 256, grad_weight=False, copied=4 * 8192 * 512)
    formula = memory.scratch_bytes(p, memory.plan(p, "stash"))
    assert_held(step_of(p, "plain", None, strategy="stash", strided=True), formula, "cpu")


def test_an_eighth_of_the_logits():
    p = Problem(4096, 32, 8192)
    assert peak_extra_bytes(step_of(p, "plain", 0.125), device="cpu") <= memory.logits_bytes(p) // 8 + SLACK["cpu"]


def test_another_upstream_gradient_adds_no_more_than_the_gradients_again():
    p = Problem(256, 256, 16384)
    given = LCE.problem((256,), 256, 16384)
    given.pop("bias")
    leaves = [given["hidden"], given["weight"]]

    def step():
        return torch.autograd.grad(LCE.op(**given, strategy="stash") / 3, leaves)

    step()
    formula = memory.scratch_bytes(p, memory.plan(p, "stash"))
    bound = max(formula, 4 * sum(x.numel() for x in leaves))
    assert peak_extra_bytes(step, device="cpu") <= bound + SLACK["cpu"]


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {"inplace": True}),
        ({"softcap": True}, {}),
        ({"stats": True}, {}),
        ({"dtype": "bfloat16", "gathered": True}, {}),
        ({"gathered": True}, {"strided": True}),
        ({"ids": 2, "stats": True, "softcap": True}, {}),
        ({"labels": "float32"}, {}),
        ({"dtype": "float64", "stats": True}, {}),
        ({"labels": "bfloat16", "softcap": True, "dtype": "bfloat16"}, {}),
    ],
    ids=str,
)
def test_rows(changes, options, monkeypatch):
    monkeypatch.setitem(row_memory.USEFUL, "cpu", 1 << 22)  # so that it is seen beside the allocator's noise
    p = row_memory.RowsProblem(512, 8192, **changes)
    budget = row_memory.default_scratch(p)
    formula = row_memory.scratch_bytes(p, row_memory.plan(p, "", budget))
    assert formula <= budget
    assert_held(step_of(p, "plain", budget, **options), formula, "cpu")


def test_what_may_overlap():
    for shape, strides in (((2, 3), (3, 1)), ((2, 3), (1, 2)), ((2, 3), (8, 2)), ((1, 3), (0, 1)), ((0, 3), (0, 0))):
        assert not may_overlap(shape, strides)
    for shape, strides in (((2, 3), (0, 1)), ((2, 3), (2, 1)), ((2, 3), (1, 1)), ((3, 2, 2), (2, 2, 1))):
        assert may_overlap(shape, strides)


def test_fp8():
    p = Problem(512, 64, 8192)
    budget = fp8_memory.scratch_bytes(p, 256)
    step = step_of(p, "plain", budget, precision="fp8")
    step()
    assert peak_extra_bytes(step, device="cpu") <= budget


def test_fp8s_plan_fits_its_budget():
    p = Problem(4096, 4096, 128256, dtype="bfloat16", device="cuda")
    least = fp8_memory.scratch_bytes(p, 128)
    for more in (0, 100 << 20, 1 << 30, 1 << 40):
        chunk = fp8_memory.plan(p, least + more)
        assert chunk % 128 == 0
        assert fp8_memory.scratch_bytes(p, chunk) <= least + more
    assert chunk == 4096
    assert fp8_memory.plan(p, None) == fp8_memory.DEFAULT_CHUNK
    # A product that is added after it was made is in the formula.
    for hidden, vocab, after in ((64, 1032, False), (64, 1033, True), (66, 1032, True)):
        parts = fp8_memory.backward_parts(Problem(128, hidden, vocab, weight_grad_out=True))
        assert parts["weight gradient in float32"] == (4 * vocab * hidden if after else 0)


# ---------------------------------------------------------------------------------------------------------------- a GPU

on_gpu = pytest.mark.gpu
WIDE = {"hidden_dtype": "float32", "weight_dtype": "float32"}


@on_gpu
@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("stash", {}), ("recompute", {}), ("stash", {"dtype": "float32"}), ("recompute", {"dtype": "float32"}),
        ("stash", WIDE), ("recompute", WIDE), ("recompute", {"softcap": True}), ("forward", NO_GRADS),
    ],
    ids=str,
)  # fmt: skip
def test_pytorchs_products_on_a_gpu(strategy, changes):
    p = Problem(4096, 1024, 32768, **{"dtype": "bfloat16"} | changes, device="cuda")
    budget = memory.scratch_at_least(p, strategy) + 64 * MIB
    formula = memory.scratch_bytes(p, memory.plan(p, strategy, budget))
    assert formula <= budget
    assert_held(step_of(p, "plain", budget, strategy=strategy), formula, "cuda")


def mixed_budget(p):
    """Scratch with which some tokens' exponentials are kept in the weight's gradient, some in scratch, some nowhere."""
    formula, plan = triton_planner.scratch_bytes, triton_planner.plan
    first, last = (formula(p, plan(p, s, 1 << 50)) for s in ("recompute", "stash"))
    for i in range(1, 256):
        try:
            budget = max(first, last) * i // 128
            c = plan(p, "auto", budget)
        except ValueError:
            continue
        if c.kept_in_gradient and c.kept_in_scratch and c.kept < p.tokens:
            return budget
    raise AssertionError(f"no budget gives a mixed plan for {p}")


COPIED = {"copied": 2 * 50257 * 1024}  # of a weight whose columns lie in rows, and begin anywhere
KERNELS = [
    ("stash", {}),
    ("mixed", {}),
    ("recompute", {}),
    ("mixed", {"grad_bias": True}),
    ("forward", NO_GRADS),
    ("stash", {"grad_weight": False}),
    ("recompute", {"grad_weight": False}),
    ("mixed", {"grad_hidden": False}),
    ("recompute", {"weight_grad_out": True}),
    ("stash", {"weight_grad_out": True}),
    ("mixed", WIDE | {"grad_bias": True}),
    ("recompute", WIDE),
    ("recompute", {"softcap": True, "smoothing": 0.1}),
    ("mixed", {"softcap": True}),
    ("mixed", {"smoothing": 0.1}),
    ("in forward", {}),
    ("in forward", {"grad_weight": False, "smoothing": 0.1}),
    ("in forward", WIDE),
    ("longer first", {"tokens": 8192, "hidden": 2048}),
    ("longer first", {"hidden": 2048}),
    ("longer first", {"hidden": 2048, "smoothing": 0.1, "grad_hidden": False}),
    ("in forward", {"weight_grad_out": True}),
    ("in forward", {"grad_weight": False, "per_token_loss": True}),
    ("mixed", {"stats": True}),
    ("auto", COPIED),
    ("auto", COPIED | NO_GRADS),
    ("auto", {"vocab": 50264, "turned": True}),  # of one whose columns begin at multiples of 16 bytes there is none
    ("auto", {"ids": 1}),
    ("auto", {"ids": 16}),
    ("auto", {"ids": 1, "stats": True}),
    ("auto", {"ids": 4, "stats": True, "softcap": True}),
    ("auto", {"ids": 1, "stats": True} | NO_GRADS),
    ("auto", {"ids": 1, "more_stats": 2} | NO_GRADS),
    ("auto", {"ids": 4} | WIDE),
    ("auto", {"ids": 1, "grad_weight": False}),
    ("auto", {"ids": 1} | COPIED),
]


@on_gpu
@pytest.mark.parametrize(("way", "changes"), KERNELS, ids=str)
def test_kernels_of_linear_losses(way, changes):
    # More tokens than a 16-bit gradient can hold the exponentials of; than a float32 one, too.  Where these are 4 H,
    # sums over chunks of tokens are faster than a mixed plan, whatever the budget.
    turned = {"turned": True} if "turned" in changes else {}
    hidden = 1536 if way == "mixed" else 1024
    sizes = {"tokens": 4096, "hidden": hidden, "vocab": 50257, "dtype": "bfloat16"}
    p = Problem(**sizes | {n: x for n, x in changes.items() if n != "turned"}, device="cuda")
    strategy = "auto" if way in ("mixed", "forward", "longer first") else way
    if way == "in forward":
        budget = triton_planner.scratch_bytes(p, triton_memory.TritonPlan(1024, in_forward=True)) + MIB
        strategy = "auto"
    elif way == "longer first":
        budget = triton_planner.scratch_bytes(p, triton_memory.TritonPlan(896, in_forward=True))
    elif way == "mixed":
        budget = mixed_budget(p)
    elif way == "forward":
        budget = triton_planner.scratch_bytes(p, triton_memory.TritonPlan(1024))
    else:
        budget = triton_planner.least_scratch(p, strategy) + 64 * MIB
    plan = triton_planner.plan(p, strategy, budget)
    formula = triton_planner.scratch_bytes(p, plan)
    assert formula <= budget
    assert plan.in_forward or way != "in forward"
    assert plan.first_chunk or way != "longer first"
    assert_held(step_of(p, "triton", budget, strategy=strategy, **turned), formula, "cuda")


@on_gpu
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"inplace": True}, {"return_stats": True}], ids=str)
@pytest.mark.parametrize("vocab", [8192, 128256])
def test_kernels_of_rows(vocab, options):
    stats = "return_stats" in options
    p = row_memory.RowsProblem((1 << 27) // vocab, vocab, "bfloat16", device="cuda", triton=True, stats=stats)
    formula = row_memory.scratch_bytes(p, row_memory.plan(p))
    step = step_of(p, "triton", None, **options)
    step()
    assert peak_extra_bytes(step, device="cuda") <= formula + MIB


@on_gpu
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("chunk", [512, 2048])
def test_fp8_on_a_gpu(chunk, before, accumulates):
    p = Problem(4096, 1024, 32768, dtype="bfloat16", device="cuda", weight_grad_out=accumulates)
    budget = fp8_memory.scratch_bytes(p, chunk)
    assert fp8_memory.plan(p, budget) == chunk
    h, w = (torch.randn(n, 1024, device="cuda").bfloat16().requires_grad_() for n in (4096, 32768))
    y = torch.randint(32768, (4096,), device="cuda")
    total = torch.zeros(w.shape, device="cuda") if accumulates else None
    op = partial(LCE.op, precision="fp8", backend="triton", scratch_bytes=budget, weight_grad_out=total)
    given = quantize_weight(w) if before else w

    def step():
        loss = op(h, given, y)
        return [loss.detach(), *torch.autograd.grad(loss, (h,) if accumulates else (h, w))]

    step()
    peak = peak_extra_bytes(step, device="cuda")
    formula = budget - (fp8_memory.weight_bytes(p) if before else 0)
    assert formula / 2 <= peak <= formula + 40 * MIB  # cuBLAS has a workspace of its own
