"""The losses on a CUDA device, on every backend: accuracy, bits, sizes, streams, graphs, compilation, devices.

test_losses.py has small problems, test_losses_memory.py the memory.
"""

import itertools
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from bits import assert_digits_stay_inside, triton_bits
from loss_checks import RIGHT, everything
from losses import CE, CHOICES, LCE, LLP, Loss, assert_near, losses, memory_off_by_256, mixed_plan, plan_in_forward
from numbers_kept import assert_is_tanh, assert_rounds
from onchip.oracle.torch import computed
from onchip.torch import cross_entropy
from shared import aside, capture, pairs_once, without_synchronisation
from tanh import triton_tanh

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF = DTYPES[1:]


@dataclass(frozen=True, eq=False)
class Way:
    """A loss, and whether its plan is mixed (`mixed_plan`), or that forward computes gradients (`plan_in_forward`)."""

    loss: Loss
    mixed: bool = False
    in_forward: bool = False

    def __str__(self):
        return f"{self.loss}-{self.loss.backend}{'-mixed' * self.mixed}{'-in_forward' * self.in_forward}"

    def make(self, tokens, hidden, vocab, *, ids=None, std=1.0, zipf=False, device="cuda", dtype=None):
        """Arguments with logits of standard deviation `std`; `zipf`: one id is that of a tenth of the tokens."""
        g = torch.Generator(device).manual_seed(0)
        dtype = dtype or (torch.bfloat16 if self.loss.linear else self.loss.dtype)

        def leaf(rows, columns, std):
            x = torch.empty(rows, columns, device=device, dtype=dtype)
            for part in x.split(max(1, (1 << 26) // columns)):
                part.copy_(torch.randn(part.shape, device=device, generator=g) * std)
            return x.requires_grad_()

        if self.loss.linear:
            given = {"hidden": leaf(tokens, hidden, 1), "weight": leaf(vocab, hidden, std / hidden**0.5)}
        else:
            given = {"logits": leaf(tokens, vocab, std)}
        shape = (tokens,) if ids is None or not self.loss.of_ids else (tokens, ids)
        if zipf:
            rank = torch.arange(1.0, vocab + 1, device=device)
            y = torch.multinomial(1 / rank, math.prod(shape), replacement=True, generator=g).view(shape)
        else:
            y = torch.randint(vocab, shape, device=device, generator=g)
        return given | {self.loss.ids: y}


PYTORCH = [Way(loss) for loss in losses("plain", "cuda")]
KERNELS = [Way(loss) for loss in losses("triton", "cuda")]
MIXED = [
    Way(Loss(loss.op, loss.checks, options, "triton", "cuda", torch.bfloat16), mixed=True)
    for loss, options in ((LCE, {"reduction": "mean"}), (LLP, {"entropy": False}), (LLP, {"entropy": True}))
]
MIXED.append(replace(MIXED[0], mixed=False, in_forward=True))
FP8 = [
    Way(Loss(LCE.op, LCE.checks, {"precision": "fp8", "reduction": r}, "triton", "cuda", torch.bfloat16))
    for r in ("mean", "none")
]
LINEAR_KERNELS = [way for way in (*KERNELS, *MIXED) if way.loss.linear]
every_way = pytest.mark.parametrize("way", [*PYTORCH, *KERNELS, *MIXED, *FP8], ids=str)


@pytest.fixture(autouse=True)
def plan(request):
    """A mixed way's."""
    way = request.node.callspec.params.get("way") if hasattr(request.node, "callspec") else None
    way = way or Way(None)
    with mixed_plan() if way.mixed else plan_in_forward() if way.in_forward else nullcontext():
        yield


def relative(made, expected):
    return float((made.double() - expected.double()).norm() / expected.double().norm())


def same_bits(made, expected):
    return all(torch.equal(x, expected[name]) for name, x in made.items())


# --------------------------------------------------------------------------------------------- bits, streams and graphs


@every_way
def test_the_same_bits_every_time(way):
    """On a side stream as well, and from one retained graph: what races differs."""
    given = way.make(1000, 520, 5003, ids=4, zipf=True)
    given[way.loss.ids][:100] = -100
    first = way.loss.run(given)
    for _ in range(3):
        assert same_bits(way.loss.run(given), first)
    made = aside(lambda: way.loss.run(given))
    torch.cuda.synchronize()
    assert same_bits(made, first)
    made = way.loss.call(given)
    upstream = way.loss.upstream(made)
    leaves = {name: x for name, x in given.items() if x.requires_grad}
    for retain in (True, True, False):
        outputs = [made[n] for n in upstream]
        grads = torch.autograd.grad(outputs, list(leaves.values()), list(upstream.values()), retain_graph=retain)
        for name, g in zip(leaves, grads, strict=True):
            assert torch.equal(g, first[f"grad_{name}"])
            g.mul_(3)  # what a caller does with its gradients must not reach the graph


@pytest.mark.parametrize("options", ["plain", "everything"])
@every_way
def test_nothing_synchronises_and_a_cuda_graph_replays(way, options):
    given = way.make(300, 136, 3003, ids=2)
    more = {}
    if options == "everything":
        more = {n: x.to("cuda") if isinstance(x, torch.Tensor) else x for n, x in everything(way.loss, given).items()}
        more = {n: x[:, 0] if isinstance(x, torch.Tensor) and x.ndim == 2 else x for n, x in more.items()}
        if way.mixed or way.in_forward:
            more.pop("softcap")
            more.pop("label_smoothing", None)
    upstream = {n: x.clone() for n, x in way.loss.upstream(way.loss.call(given, **more)).items()}
    step = partial(way.loss.run, given, upstream, **more)
    without_synchronisation(step)
    graph, captured = capture(step)
    with torch.no_grad():
        for x in given.values():
            if x.is_floating_point():
                x.copy_(-1.5 * x)
        given[way.loss.ids][::3] = -100
        given[way.loss.ids][1] = 3003
        for x in upstream.values():
            x.mul_(2)
    graph.replay()
    expected = step()
    assert expected[way.loss.values[0]].isnan().any()
    for name, x in captured.items():
        assert torch.equal(x.nan_to_num(7), expected[name].nan_to_num(7)), name


@every_way
def test_every_device_whichever_is_current(way):
    expected = way.loss.run(way.make(300, 128, 1000, ids=2))
    given = way.make(300, 128, 1000, ids=2)
    for index in range(torch.cuda.device_count()):
        there = {n: x.detach().to(f"cuda:{index}").requires_grad_(x.requires_grad) for n, x in given.items()}
        made = way.loss.run(there)
        assert all(x.device == there[way.loss.ids].device for x in made.values())
        assert all(torch.equal(x.to("cuda:0"), expected[name]) for name, x in made.items())


@every_way
def test_compiled_by_inductor(way):
    """Around it, and for any number of tokens."""
    torch._dynamo.reset()
    if way.loss.inplace or way.mixed:
        return
    first = "hidden" if way.loss.linear else "logits"

    def step(given):
        return way.loss.call(given | {first: given[first] * 2})

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for tokens in (24, 300, 1024):
        given = way.make(tokens, 128, 1000, ids=3)
        leaves = [x for x in given.values() if x.requires_grad]
        made, expected = compiled(given), step(given)
        upstream = way.loss.upstream(expected)
        for name, x in made.items():
            assert_near(name, x.detach(), expected[name].detach().cpu())
        for g, q in zip(*(torch.autograd.grad([x[n] for n in upstream], leaves, list(upstream.values()))
                          for x in (made, expected)), strict=True):  # fmt: skip
            assert relative(g, q) < 1e-2


@every_way
@pytest.mark.parametrize("ignored", [0.5, 1.0])
def test_ignored_tokens_leak_nothing(ignored, way):
    given = way.make(1000, 520, 5003, ids=3)
    gone = torch.rand(1000, device="cuda") < ignored
    given[way.loss.ids][gone] = -100
    name = "hidden" if way.loss.linear else "logits"
    zeroed = given | {name: given[name].detach().masked_fill(gone[:, None], 0).requires_grad_()}
    expected = way.loss.run(zeroed)
    with torch.no_grad():
        given[name][gone] = math.nan
    upstream = {n: x.clone() for n, x in way.loss.upstream(expected).items()}
    for x in upstream.values():
        if x.ndim:
            x[gone] = math.nan
    made = way.loss.run(given, upstream)
    assert all(x.isfinite().all() for x in made.values())
    assert same_bits(made, expected)
    assert not made[f"grad_{name}"][gone].any()


# ------------------------------------------------------------------------------------------------------------- accuracy


def plain(given, *, entropy=False, wide=True):
    """Loss or log-probabilities and entropy written out; `wide`: with float32 logits of a 16-bit product."""
    z = given["logits"] if "logits" in given else F.linear(given["hidden"], given["weight"])
    z = z.float() if wide and z.dtype in HALF else z
    if "ids" not in given:
        return {"loss": F.cross_entropy(z, given["target"])}
    y = given["ids"]
    log_p = z.log_softmax(-1)
    made = {"log_prob": log_p.gather(-1, y.view(len(y), -1)).view(y.shape)}
    return made | ({"entropy": -(log_p.exp() * log_p).sum(-1)} if entropy else {})


def differentiated(function, given):
    """Values and gradients, by upstream gradients that depend on the shapes alone."""
    names = ("log_prob", "entropy") if "ids" in given else ("loss",)
    made = {n: x for n, x in function(given).items() if n in names}
    leaves = {n: x for n, x in given.items() if x.requires_grad}
    g = torch.Generator("cuda").manual_seed(1)
    upstream = [torch.randn(x.shape, device="cuda", generator=g).to(x) for x in made.values()]
    grads = torch.autograd.grad(list(made.values()), list(leaves.values()), upstream)
    return {n: x.detach() for n, x in made.items()} | dict(zip(leaves, grads, strict=True))


def float64(given, **how):
    wide = {n: x.detach().double().requires_grad_() if x.requires_grad else x for n, x in given.items()}
    return differentiated(partial(plain, **how), wide)


MEANS = [way for way in LINEAR_KERNELS if way.loss.options.get("reduction") != "none"]
PROBLEMS = [
    # The bound is of the error of the eager expression with float32 logits of the 16-bit product.
    ((2048, 1024, 32000), {"std": 1.0}, 1.05),
    ((2048, 1024, 32000), {"std": 30.0, "zipf": True}, 1.05),
    ((600, 256, 3001), {"std": 60.0}, 2),  # 100 above the target's: exponentials relative to that would overflow
    ((4097, 31, 50257), {}, 1.2),
    ((127, 2880, 50257), {"std": 0.02, "zipf": True}, 1.2),
    ((4097, 520, 2049), {}, 1.2),
]


@pytest.mark.parametrize("ids", [None, 5])
@pytest.mark.parametrize(("size", "more", "bound"), PROBLEMS, ids=str)
@pytest.mark.parametrize("way", MEANS, ids=str)
def test_kernels_are_no_less_accurate_than_eager(way, size, more, bound, ids):
    loss = way.loss
    if ids and not loss.of_ids:
        return
    given = way.make(*size, ids=ids, **more)
    how = {"entropy": loss.options.get("entropy", False)}
    reference = float64(given, **how)
    eager = differentiated(partial(plain, **how), given)
    made = differentiated(way.loss.call, given)
    for name, x in reference.items():
        assert made[name].isfinite().all()
        limit = max(bound * relative(eager[name], x), 1e-5 if name in ("loss", "log_prob") else 0)
        assert relative(made[name], x) <= limit, name


@pytest.mark.parametrize("std", [0.02, 1.0, 30.0])
@pytest.mark.parametrize("way", [way for way in (*PYTORCH, *MEANS) if way.loss.op is LCE.op], ids=str)
def test_a_models_head_in_bfloat16_beats_the_plain_expression(way, std):
    """Of so many tokens that their float64 logits fit."""
    if way.loss.options["reduction"] == "none":
        return
    given = way.make(1365, 2880, 128256, std=std)
    reference = float64(given)
    eager = differentiated(partial(plain, wide=False), given)
    made = differentiated(way.loss.call, given)
    assert relative(made.pop("loss"), reference.pop("loss")) <= 1e-5
    assert all(relative(made[name], x) <= 2 * relative(eager[name], x) for name, x in reference.items())


@pytest.mark.parametrize("way", [*KERNELS, *FP8[:1]], ids=str)
def test_more_logits_than_32_bits_count(way):
    """Rows at the begin and the end are those of a call of their own, and the weight's gradient is a sum of parts'."""
    tokens, hidden, vocab = (32768, 64, 131072) if way.loss.linear else (16900, 64, 128256)
    assert tokens * vocab > 1 << 31
    loss, first = way.loss, "hidden" if way.loss.linear else "logits"
    given = way.make(tokens, 128 if way in FP8 else hidden, vocab, ids=2, dtype=torch.bfloat16)
    given[loss.ids].view(-1)[-6:] = torch.arange(vocab - 6, vocab, device="cuda")
    options = {"normalizer": 1} if loss.options.get("reduction") == "mean" else {}
    options |= {"scratch_bytes": 1 << 40} if way in FP8 else {}  # all tokens in one chunk
    upstream = {n: torch.ones_like(x) for n, x in way.loss.call(given, **options).items() if n in loss.values}
    made = way.loss.run(given, upstream, **options)
    total, bound = 0, 5e-2 if way in FP8 else 1e-2
    quarter = -(-tokens // 4)
    for start in range(0, tokens, quarter) if loss.linear else (0, tokens - 64):
        rows = slice(start, start + quarter if loss.linear else start + 64)
        part = {n: x[rows] if n != "weight" else x for n, x in given.items()}
        part = {n: x.detach().requires_grad_(given[n].requires_grad) for n, x in part.items()}
        expected = way.loss.run(part, {n: x[rows] if x.ndim else x for n, x in upstream.items()}, **options)
        assert relative(made["lse"][rows], expected["lse"]) < 1e-5
        assert relative(made[f"grad_{first}"][rows], expected[f"grad_{first}"]) < bound
        total = total + expected["grad_weight"].double() if loss.linear else 0
    if loss.linear:
        for rows in (slice(0, 64), slice(vocab - 64, vocab)):
            assert relative(made["grad_weight"][rows], total[rows]) < bound


# ---------------------------------------------------------------------------- where the exponentials of logits are kept

CASES = [
    {"zipf": True, "reduction": "none"},
    {"hidden": 259, "ignored": 0.2, "ids": 3, "ignored_ids": 0.2},
    {"bias": True, "ignored": 0.2, "token_weight": True, "token_temperature": True, "masked": 300, "ids": 2,
     "z_loss": 1e-3, "logit_scale": 0.5, "normalizer": 100},
    {"logit_std": 60.0, "zipf": True, "bias": True, "ids": 5},
]  # fmt: skip


KEPT = [way for way in MEANS if not way.in_forward]


@pairs_once("fields, dtype, way", itertools.product(CASES, HALF, KEPT))
def test_plans(fields, dtype, way):
    fields = dict(fields)
    names = ("reduction", "z_loss", "logit_scale", "normalizer")
    options = {n: fields.pop(n) for n in names if n in fields}
    case = way.loss.case("plan", 600, fields.pop("hidden", 264), 2049, **fields, options=options)
    way.loss.assert_case(case, dtype)


@pytest.mark.parametrize("way", KEPT, ids=str)
def test_memory_at_multiples_of_256_bytes(way):
    with memory_off_by_256():
        way.loss.assert_case(way.loss.case("off", 300, 136, 600, bias=True))


@pytest.mark.parametrize("way", LINEAR_KERNELS, ids=str)
@pytest.mark.parametrize(
    ("size", "options"),
    [((264, 3000), {}), ((264, 3000), {"softcap": 5.0}), ((259, 3000), {}), ((264, 2049), {})],
    ids=["descriptors", "descriptors, softcap", "pointers", "copied"],
)
def test_a_weight_whose_columns_lie_in_rows(size, options, way):
    if way.mixed and options:
        return
    given = way.make(600, *size, ids=3)
    turned = given["weight"].detach().T.contiguous().T.requires_grad_()
    expected = way.loss.run(given, **options)
    for name, x in way.loss.run(given | {"weight": turned}, **options).items():
        assert torch.equal(x, expected[name]) if name in CHOICES else relative(x, expected[name]) < 1e-3, name


@pytest.mark.parametrize("way", [way for way in KERNELS if way.loss.op is LCE.op], ids=str)
@pytest.mark.parametrize("hidden", [520, 515])
def test_weight_grad_out_accumulates(hidden, way):
    total = torch.full((5003, hidden), 1e-3, device="cuda")
    expected = total.double()
    for tokens in (700, 1400):
        given = way.make(tokens, hidden, 5003)
        made = way.loss.run(given)
        loss = way.loss.call(given, weight_grad_out=total)["loss"]
        loss.backward(way.loss.upstream({"loss": loss})["loss"])
        expected += made["grad_weight"].double()
        assert given["weight"].grad is None
        assert relative(given["hidden"].grad, made["grad_hidden"]) < 1e-3
    assert relative(total - 1e-3, expected - 1e-3) < 5e-3


# -------------------------------------------------------------------------------------------- rows of logits that exist

# Rows that stay in registers, that are read again from the caches, and that are not aligned, 131073 by hardly more than
# whole tiles.
VOCABS = (1000, 8192, 32001, 50257, 65536, 128256, 131073, 262144)
ROWS = next(way for way in KERNELS if way.loss.op is CE.op)


def rounding(dtype):
    """Of a gradient that is rounded once, the relative error's norm is below this; of float32, that of its sums."""
    return 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2


@pairs_once("dtype, vocab, std", itertools.product(DTYPES, VOCABS, (0.02, 1.0, 30.0)))
def test_every_row_against_float64(dtype, vocab, std):
    """The fused gradient, the one of an upstream gradient of 3, per token, and in place; more rows than programs."""
    op = partial(cross_entropy, backend="triton")
    given = ROWS.make(601, 0, vocab, dtype=dtype, std=std)
    x, y = given["logits"], given["target"]
    y[::7] = -100
    rows = (y != -100).nonzero()[:, 0]
    exact = x[rows].detach().double()
    lse = torch.logsumexp(exact, 1)
    loss = F.cross_entropy(exact, y[rows], reduction="none")
    grad = (exact - lse[:, None]).exp() - F.one_hot(y[rows], vocab)
    bound = 8e-6 * (1 + std)
    made, stats = op(x, y, reduction="sum", return_stats=True)
    assert abs(float(made) / float(loss.sum()) - 1) < bound
    assert relative(stats.lse[rows], lse) < bound
    assert not stats.lse[y == -100].any()
    upstream = torch.rand(601, device="cuda") + 0.5
    per_token = op(x, y, reduction="none")
    assert relative(per_token[rows], loss) < bound
    copy = computed(x)
    over = op(copy, y, reduction="none", inplace_backward=True)
    for value, leaf, g, expected in (
        (made, x, None, grad),
        (op(x, y, reduction="sum"), x, torch.tensor(3.0, device="cuda"), 3 * grad),
        (per_token, x, upstream, grad * upstream[rows, None]),
        (over, copy, upstream, grad * upstream[rows, None]),
    ):
        (found,) = torch.autograd.grad(value, leaf, g)
        assert relative(found[rows], expected) < max(rounding(dtype), bound)
        assert not found[y == -100].any()


@pytest.mark.parametrize("upstream", [1.0, 0.0, math.inf])
@pytest.mark.parametrize("vocab", [1000, 128256])
def test_the_upstream_gradient_is_known_to_the_device_alone(vocab, upstream):
    given = ROWS.make(300, 0, vocab, dtype=torch.float32)
    g = ROWS.loss.run(given, {"loss": torch.tensor(upstream, device="cuda")})["grad_logits"]
    if upstream == math.inf:
        assert not g.isfinite().any()
    else:
        expected = PYTORCH[4].loss.run(given, {"loss": torch.tensor(upstream, device="cuda")})
        assert_near("grad_logits", g, expected["grad_logits"].cpu())


def test_long_rows_masked_up_to_the_target():
    given = ROWS.make(40, 0, 70000, dtype=torch.float32)
    y = torch.linspace(0, 69999, 40, device="cuda").long()
    with torch.no_grad():
        given["logits"].masked_fill_(torch.arange(70000, device="cuda") < y[:, None], -math.inf)
    ROWS.loss.assert_right(given | {"target": y}, scale=4)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_small_losses_of_long_rows_keep_their_digits(reduction):
    """p - 1 and log p of a p that float32 can hardly tell from 1."""
    given = ROWS.make(200, 0, 128256, dtype=torch.float32)
    i, y = torch.arange(200, device="cuda"), given["target"]
    with torch.no_grad():
        given["logits"][i, y] = 12 + torch.linspace(8, 20, 200, device="cuda")
    z = given["logits"].detach().double()
    rest = z.clone()
    rest[i, y] = -math.inf
    loss = torch.log1p((rest.logsumexp(1) - z[i, y]).exp())
    assert loss.min() < 1e-8
    made = ROWS.loss.call(given, reduction="none")["loss"]
    assert float((made / loss - 1).abs().max()) < 3e-5
    value = ROWS.loss.call(given, reduction=reduction)["loss"]
    (g,) = torch.autograd.grad(value, given["logits"], torch.ones_like(value))
    g = g * (200 if reduction == "mean" else 1)
    assert float((g[i, y] / torch.expm1(-loss) - 1).abs().max()) < 3e-5


@pytest.mark.parametrize("kept", [12, 16, "rounded"])
def test_floats_of_few_digits(kept):
    digits = 16 if kept == 16 else 12
    assert_rounds(partial(triton_bits, device="cuda", paired=digits == 12, rounded=kept == "rounded"), digits)


def test_digits_stay_inside():
    assert_digits_stay_inside("cuda")


def test_tanh_at_any_size():
    assert_is_tanh(partial(triton_tanh, device="cuda"))


@pytest.mark.parametrize("way", [way for way in KERNELS if way.loss.of_ids], ids=str)
def test_a_student_that_agrees_with_its_teacher(way):
    """Where an id's probability is its upstream gradient, nothing of its entry is left: no rounding either."""
    given = way.make(512, 256, 300, std=3.0)
    wide = {n: x.detach().double().requires_grad_() for n, x in given.items() if x.requires_grad}
    with torch.no_grad():
        logits = wide["logits"] if "logits" in wide else F.linear(wide["hidden"], wide["weight"])
        p, given["ids"] = logits.softmax(-1).topk(16)
    made = way.loss.run(given, {"log_prob": p.float()})
    exact = plain(wide | {"ids": given["ids"]})["log_prob"]
    for (name, _), g in zip(wide.items(), torch.autograd.grad(exact, list(wide.values()), p), strict=True):
        assert relative(made[f"grad_{name}"], g) < RIGHT[torch.bfloat16]
