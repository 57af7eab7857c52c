"""The kernels of every call that tests/manifests records, and of some more, compile without a GPU: they fit its shared
memory, spill next to nothing, and have the instructions that they are written for.
"""

import math
import re
from functools import cache, partial
from unittest import mock

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from compiled import compiled, is_serialized, kinds, unused_barriers
from launched import H100, recorded
from launched_cases import CASES, F32, OPTIONS, attended, blank, grouped, head, of_logits, quantised, sharded, two_heads
from losses import mixed_plan, plan_in_forward
from onchip import masks
from onchip.attention.triton import handoff
from onchip.attention.triton import launches as attention_launches
from onchip.collectives import triton_launches as between_ranks
from onchip.kernels.triton import trial
from onchip.kernels.triton.gluon import FIRST_NAMED
from onchip.kernels.triton.launch import Device
from onchip.ops.grouped_matmul.cases import MODELS
from onchip.ops.linear_jsd import triton_kernels as jsd_kernels
from onchip.ops.linear_jsd import triton_product as jsd_product
from onchip.ops.linear_jsd import triton_topk as jsd_topk
from onchip.torch import jsd, linear_cross_entropy, linear_log_probs, log_probs
from onchip.vocab.triton import gradients, softmax, sums, vectors

F16 = torch.float16
HEAD, SMALL = {"hidden": 1024, "vocab": 8192}, {"hidden": 512, "vocab": 1000}
EVERYTHING = {"bias": True} | OPTIONS["everything"]
AS_TEACHER = {"teacher_grad": True, "temperature": 2.0, "hard": True, "hard_weight": 0.3, "bias": True}
ODD, SCALED = {"hidden": 515, "vocab": 1000}, {"way": "scattered", "bias": True, "activation": "swiglu"}
LARGE = {"hidden": 2048, "vocab": 128256, "start": None}


def in_forward(**options):
    """By a plan whose gradients are computed in forward, of two chunks of tokens."""
    with plan_in_forward(640):
        head(1000, vocab=20001, **options)


def forward_alone(hidden):
    given = {"hidden": blank(2048, hidden), "weight": blank(1000, hidden), "target": blank(2048, dtype=torch.int64)}
    recorded(linear_cross_entropy, given, given | {"backend": "triton"})


EVERY_STATISTIC = {"label_smoothing": 0.1, "return_stats": True}
# What kernels may be asked for beyond what is recorded: other dtypes, layouts and sizes.
MORE = {
    "linear_cross_entropy": {
        "float16": partial(head, 8192, **HEAD, **EVERYTHING, dtype=F16),
        "dense labels in fp8": partial(head, 512, **HEAD, labels="dense", precision="fp8", **OPTIONS["everything"]),
        "a turned weight, again": partial(head, 2048, **HEAD, turned=True, strategy="recompute", label_smoothing=0.1),
        "ragged in fp8": partial(head, 512, hidden=1024, vocab=4100, precision="fp8"),
        "pointers": partial(head, 2048, **ODD, **EVERYTHING),
        "added to the caller's": partial(head, 32768, hidden=1024, vocab=20001, add=True),
        "in forward": partial(in_forward, hidden=528),
        "in forward, smoothed": partial(in_forward, hidden=528, label_smoothing=0.1, dtype=F16),
        "forward alone": partial(forward_alone, 576),
        "smoothed with a bias": partial(head, 8192, **HEAD, bias=True, label_smoothing=0.1),
    },
    "linear_log_probs": {
        "float16": partial(head, 2048, **HEAD, op=linear_log_probs, ids=4, entropy=True, bias=True, dtype=F16),
    },
    "linear_jsd": {
        "float16": partial(two_heads, 4096, **HEAD, **AS_TEACHER, dtype=F16, beta=0.3),
        "turned weights": partial(two_heads, 4096, **HEAD, **AS_TEACHER, turned=True),
        "of tokens": partial(two_heads, 4096, **HEAD, token_weight="each", normalizer=100.0),
    } | {
        f"topk {rest}, {dtype}": partial(two_heads, 4096, **HEAD, rest=rest, dtype=dtype, temperature=2.0, beta=beta,
                                         token_weight="each", hard=True, hard_weight=0.1)
        for rest, dtype, beta in (("tail", F16, 0.3), ("truncated", torch.bfloat16, 0.0), ("renormalised", F16, 1.0))
    },
    "jsd": {
        f"{dtype}": partial(of_logits, 4096, vocab=1024, op=jsd, dtype=dtype, hard_weight=0.1, teacher_grad=True)
        for dtype in (F16, F32)
    } | {"topk": partial(of_logits, 4096, vocab=1024, op=jsd, labels="tail", dtype=F32, hard_weight=0.1)},
    "cross_entropy": {
        "rows that are not aligned": partial(of_logits, 500, vocab=50257),
        "the same, smoothed, with statistics": partial(of_logits, 500, vocab=32001, **EVERY_STATISTIC),
        "the same, dense labels": partial(of_logits, 500, vocab=50257, labels="dense"),
        "a few more than whole tiles": partial(of_logits, 500, vocab=131073),
        "float16": partial(of_logits, 500, vocab=1000, dtype=F16, **OPTIONS["statistics"]),
    },
    "log_probs": {
        "rows that are not aligned": partial(of_logits, 500, vocab=50257, op=log_probs, ids=4, entropy=True),
    },
    "grouped_matmul": {
        "scaled": partial(grouped, 4096, model=MODELS[-1], **SCALED),
        "interleaved and scaled": partial(grouped, 4096, model=MODELS[-1], **SCALED, gate_up="interleaved"),
        "turned": partial(grouped, 4096, model=MODELS[-1], turned=True, bias=True, sizes="group_offsets"),
        "turned rows": partial(grouped, 4096, model=MODELS[-1], turned=True, way="rows", bias=True),
        "scaled rows": partial(grouped, 4096, model=MODELS[-1], way="scaled rows", bias=True),
        "float32": partial(grouped, 4096, model=MODELS[-1], way="scaled rows", dtype=F32, bias=True),
        "fp8, scaled": partial(grouped, 4096, model=MODELS[-1], **SCALED, precision="fp8"),
        "fp8, added": partial(grouped, 4096, model=MODELS[-1], way="added", precision="fp8"),
    },
    "fp8_linear": {
        "tall": partial(quantised, 65536 * 128, n=256, k=256),
        "ragged": partial(quantised, 4095, n=4112, k=528, add=True, bias=True),
    },
    "sharded": {
        "statistics of logits": partial(sharded, 4096, call=of_logits, ranks=2, vocab=128256, return_stats=True),
        "even": partial(sharded, 4096, call=head, ranks=2, **LARGE, token_weight="each", label_smoothing=0.1),
        "even, float16": partial(sharded, 8192, call=head, ranks=2, **LARGE, label_smoothing=0.1, dtype=F16),
    },
    "attention": {
        f"one kernel for all gradients, {size}, softcap": partial(attended, 8192, mask=masks.Causal(), size=size,
                                                                  value_size=size, softcap=20.0)
        for size in (64, 128)
    } | {
        f"heads of {size}, {name}": partial(attended, 8192, mask=masks.Tree(blank(8192, dtype=torch.int64)), size=size,
                                            value_size=min(size, 128) if size < 256 else size, **options)
        for size in (64, 128, 192, 256)
        for name, options in {"sinks": {"sinks": True}, "softcap": {"softcap": 20.0}}.items()
    },
}  # fmt: skip
A100, ADA, AMPERE = Device(80, 108, 166912), Device(89, 142, 101376), Device(86, 84, 101376)
TREE, CAUSAL = masks.Tree(blank(300, dtype=torch.int64)), masks.Causal()
HEADS = {"heads": 4, "key_heads": 2, "batch": 2}
FOR_OTHERS = {
    "attention of 64, softcap": partial(attended, 300, mask=CAUSAL, **HEADS, size=64, value_size=64, softcap=20.0),
    "attention of 128, stop and sinks": partial(attended, 300, mask=TREE, **HEADS, sinks=True),
    "attention of 128": partial(attended, 300, mask=CAUSAL, **HEADS),
    "linear_cross_entropy": partial(head, 2048, **SMALL),
    "linear_cross_entropy, everything": partial(head, 2048, **SMALL, **EVERYTHING),
    "linear_log_probs": partial(head, 300, **SMALL, op=linear_log_probs, entropy=True, dtype=F16),
    "linear_jsd": partial(two_heads, 300, **SMALL, beta=1.0),
    "linear_jsd of a topk": partial(two_heads, 300, **SMALL, rest="tail", dtype=F16, hard=True, hard_weight=0.1),
    "cross_entropy in float32": partial(of_logits, 300, vocab=128256, dtype=F32, reduction="none"),
    "cross_entropy of dense labels": partial(
        of_logits, 300, vocab=1000, labels="dense", dtype=F16, label_smoothing=0.1
    ),
    "cross_entropy of a topk": partial(of_logits, 300, vocab=1000, labels="topk", dtype=F32, **OPTIONS["everything"]),
    "grouped_matmul": partial(grouped, 4096, model=MODELS[-1], **SCALED),
    "grouped_matmul, added": partial(grouped, 4096, model=MODELS[-1], way="added"),
}
# By GPU, of which calls: the products, whose tiles differ.
OTHERS = {
    "A100": (A100, ["attention of 128, stop and sinks", "grouped_matmul"]),
    "GeForce": (AMPERE, ["linear_jsd"]),
    "Ada": (ADA, []),
    "B200": (Device(100, 148, 232448), ["attention of 128", "linear_jsd"]),
}
ON_MORE = [(*x, name) for x in OTHERS.items() for name in FOR_OTHERS if name not in x[1][1]]

# ------------------------------------------------------------------------------------------------------------ the rules

ATTENTION = ("attend", "query_gradient", "key_gradient", "paired_key_gradient", "attend_wide")
BY_TILES = ("attend_by_tiles", "query_gradient_by_tiles", "key_gradient_by_tiles")
# Bytes of a thread's stack that kernels may take, always or if they are launched with an option; others take none.
# Without descriptors (NO_TMA) a product's addresses take registers of their own.
STACK = {
    "add_targets": {"": 16},
    "softmax_tiles": {
        "class_weight": 40,
        "inner_scale": 144,
        "offset_sum": 400,
        "squares": 376,
        "moment": 512,
        "NO_TMA": 232,
    },
    "softmax_in_turns": {"": 24},
    "softmax_staggered": {"offset_sum": 320},
    "gradient_tiles": {"": 8, "bias": 16, "labels": 160, "NO_TMA": 96},
    "weight_gradient": {"NO_TMA": 352},
    "weight_added": {"old_sum": 24},
    "losses": {"": 48, "class_total": 112, "entropy": 320},
    "gradients": {"SMOOTHING": 32},
    "log_probs": {"LINE": 24, "top1": 440},
    "log_prob_gradients": {"class_weight": 16},
    "soft_losses": {"class_weight": 48, "LINE": 8},
    "softmax_gradient": {"": 64, "class_weight": 288},
    "divergence_rows": {"": 16},
    "quantize_words": {"WHOLE": 56},
    "sum_rows": {"row_scale": 8},
    "fused_gradient": {"": 24, "softcap": 168},
    "paired_fused_gradient": {"": 48, "softcap": 176},
}
STACK |= {kernel: {"": 176, "softcap": 376} for kernel in ATTENTION}
# What compilers later than Triton 3.6's take besides.
LATER = {
    "softmax_tiles": {"bias": 40},
    "gradient_tiles": {"class_weight": 144},
    "logit_tiles": {"bias": 88},
    "divergence_rows": {"": 24},
    "gradients": {"SMOOTHING": 64},
    "log_prob_gradients": {"": 16},
}
if not triton.__version__.startswith("3.6."):
    STACK |= {kernel: STACK.get(kernel, {}) | more for kernel, more in LATER.items()}
ON_OTHERS = dict.fromkeys(BY_TILES, 128) | {"grouped_product": 8, "grouped_weight_gradient": 8}
REGISTERS = {
    "losses": 64,
    "gradients": 64,
    "log_probs": 64,
    "log_prob_gradients": 64,
    "soft_losses": 64,
    "soft_gradients": 64,
}
PRODUCTS = {
    "softmax_tiles", "gradient_tiles", "weight_gradient", "hidden_gradient", "logit_tiles", "softmax_staggered",
    "gradient_staggered", "softmax_in_turns", "weight_added", "hidden_apart", "grouped_product",
    "grouped_weight_gradient", "product_apart", "weight_gradient_apart", "scaled_product", "scaled_weight_gradient",
    "attend", "query_gradient", "key_gradient", "paired_key_gradient", "attend_wide", "fused_gradient",
    "paired_fused_gradient", "attend_by_tiles", "query_gradient_by_tiles", "key_gradient_by_tiles", "gated_product",
    "adding_product",
}  # fmt: skip
# Those that read rows of a matrix once, by 16 bytes where rows begin at multiples of that; and the others, if they do.
ROWS = ("losses", "gradients", "log_probs", "log_prob_gradients", "soft_losses", "soft_gradients")
STREAMS = {"divergence_rows": "TERMS", "topk_log_probs": "TAIL", "topk_gradients": "", "gradient_rows": ""}


FORMATS = {"fp8e4nv": "e4m3", "fp8e5": "e5m2"}


def form_of(x):
    return {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}[getattr(x, "base", x).dtype]


def is_on(k, option):
    return option == "" or (not k.constants.get("TMA", True) if option == "NO_TMA" else bool(k.constants.get(option)))


def problems(launch, device):
    """What is wrong with a kernel."""
    k = compiled(launch, device.capability)
    hopper, floats = device is H100, k.constants.get("PRECISION") == "ieee"
    if hopper:
        allowed = max((n for option, n in STACK.get(k.kernel, {}).items() if is_on(k, option)), default=0)
    else:
        allowed = ON_OTHERS.get(k.kernel, math.inf)
    # Two programs of softmax_gradient share a multiprocessor, and of rows as many as registers allow.
    room = {"softmax_gradient": device.shared // 2} | dict.fromkeys(ROWS, 8192)
    if k.shared > room.get(k.kernel, device.shared):
        yield f"{k.shared} bytes of shared memory"
    if k.spilled > allowed:
        yield f"{k.stack} bytes of stack, more than {allowed}"
    if k.registers > REGISTERS.get(k.kernel, 255):
        yield f"{k.registers} registers"
    if k.kernel in PRODUCTS and not floats:
        if device.capability <= 90 and ("wgmma.mma_async" if hopper else "mma.sync") not in k.ptx:
            yield "no tensor cores"
        copied = [on for name, on in k.constants.items() if name.startswith("TMA")]
        if ("cp.async.bulk.tensor" in k.ptx) != (any(copied) if copied else hopper):
            yield "TMA"
        if launch.kernel.is_gluon() and is_serialized(k):
            yield "each step of a product waits for the one before"
    if k.kernel.endswith("_by_tiles") and not k.constants["stop"] and "cp.async.c" not in k.ptx:
        yield "it waits for each block"
    # A named barrier's number comes from a register; Triton's own are lower.
    numbers = [int(x) for x in re.findall(r"(?:bar|barrier)\.\S+\s+(\d+)", k.ptx)]
    if k.kernel in ("attend", "attend_wide") and max(numbers) >= FIRST_NAMED.value:
        yield "Triton takes a barrier that has a name"
    if k.kernel == "quantize_words":
        yield from problems_of_quantising(k, launch)
    if k.kernel == "scaled_product":
        # Four instructions of 32 products each are summed before their sum is scaled; no more than that.
        formats = re.findall(r"wgmma\.mma_async\.sync\.aligned\.\w+\.f32\.(\w+)\.(\w+)", k.ptx)
        given = {(form_of(launch.arguments["a"]), form_of(launch.arguments["b"]))}
        if {*formats} != given or len(formats) != 4 * k.constants["BLOCK_M"] // (16 * launch.warps):
            yield f"{len(formats)} products of {formats}"
    if k.kernel in ROWS:
        wide = {16: "v4.b32", 8: "v2.b32", 4: "b32", 2: "b16"}[
            k.constants["UNIT"] * launch.arguments["logits"].itemsize
        ]
        if f"ld.global.L1::evict_first.L2::cache_hint.{wide}" not in k.ptx:
            yield "rows are read in another way"
    if k.kernel in STREAMS and is_on(k, STREAMS[k.kernel]) and "ld.global.v4" not in k.ptx:
        yield "rows aren't read by 16 bytes"


def problems_of_quantising(k, launch):
    pairs, whole, aligned = launch.arguments["x"].itemsize == 2, k.constants["WHOLE"], k.constants["ALIGNED"]
    ways, form = 2 if whole else 1, FORMATS[str(k.constants["FP8"])]
    # Of 16-bit numbers four programs of 8 warps fit a multiprocessor, of whole blocks, else three; of float32 two.
    if k.registers > (128 if not pairs else 64 if whole and aligned else 80):
        yield f"{k.registers} registers"
    # To the nearest, ties to even, saturating; two numbers to an instruction.
    if f"cvt.rn.satfinite.{form}x2.f32" not in k.ptx:
        yield "it rounds in another way"
    if "div." in k.ptx:  # may call a function, which takes 64 registers more
        yield "it divides"
    outs = bool(k.constants["rows"]) + bool(k.constants["columns"])
    if k.ptx.count("cvt.rn.satfinite") != 32 * outs * ways:
        yield "it rounds again"
    if k.ptx.count("rcp.approx") != ways * (1 if k.constants["BY_BLOCK"] else outs):
        yield "it computes other scales than one of each kind"
    if k.constants["columns"] and not re.search(r"st\.global(\.\w+)*\.v4\.b32", k.ptx):
        yield "it doesn't store 16 bytes at a time"
    # A block is read once, by 256 threads 16 bytes at a time; pairs that begin anywhere are put together from words.
    loads = len(re.findall(r"ld\.global(\.\w+)*\.v4\.b32" if aligned else r"ld\.global", k.ptx))
    if loads != (ways * (8 if pairs else 16) if aligned else 64) or (k.ptx.count("prmt.b32") < 32 and not aligned):
        yield f"{loads} loads"


def wrong(launches, device=H100):
    """What is, of each kernel with what it is launched with."""
    found = [(x, said) for x in launches for said in problems(x, device)]
    return [f"{x.kernel.__name__}: {said}; {[p for p, on in switches(x).items() if on]}" for x, said in found]


# ------------------------------------------------------------------------------------------------------------ the calls


def switches(launch):
    """By parameter, whether the launch has it on: a flag that is true, an option that is given."""
    made = {}
    for p in launch.kernel.params:
        x = launch.arguments[p.name]
        made |= {p.name: bool(x) if p.is_constexpr else x is not None}
    return made


@cache
def of_calls():
    """By op, launches of its calls whose kernels differ, without those of ops before it."""
    found, made = set(), {}
    for op, cases in CASES.items():
        each = kinds([*cases.values(), *MORE.get(op, {}).values()])
        made[op] = [launch for key, launch in each.items() if key not in found]
        found |= each.keys()
    return made


@cache
def quick():
    """By op, of each kernel the launch that has most of its arguments and flags on, which takes most registers; of
    attention, whose kernels take the longest, the first.
    """
    found, made = {}, {op: [] for op in CASES}
    for op, launches in of_calls().items():
        for launch in launches:
            found.setdefault(launch.kernel.__name__, []).append((op, launch))
    for each in found.values():
        op, launch = max(each, key=lambda x: 0 if x[0] == "attention" else sum(switches(x[1]).values()))
        made[op].append(launch)
    return made


@pytest.mark.parametrize("op", CASES)
def test_kernels(op):
    assert wrong(quick()[op]) == []


@pytest.mark.slow
@pytest.mark.parametrize("op", CASES)
def test_all_kernels(op):
    checked = [*map(id, quick()[op])]
    assert wrong(x for x in of_calls()[op] if id(x) not in checked) == []


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        *((gpu, name) for gpu, (_, names) in OTHERS.items() for name in names),
        *(pytest.param(gpu, name, marks=pytest.mark.slow) for gpu, *_, name in ON_MORE),
    ],
)
def test_kernels_for_other_gpus(gpu, name):
    device, _ = OTHERS[gpu]
    launches = kinds([FOR_OTHERS[name]], device).values()
    assert wrong((x for x in launches if x.kernel.__name__ in PRODUCTS or not name.startswith("linear")), device) == []


def test_every_kernel_is_launched_with_every_switch_on():
    """But for what no call has."""
    found = {}
    for launch in (x for launches in of_calls().values() for x in launches):
        for name, on in switches(launch).items():
            found[launch.kernel.__name__, name] = on or found.get((launch.kernel.__name__, name), False)
    assert {x for x, on in found.items() if not on} == {
        ("product_apart", "row_scale"),
        ("grouped_weight_gradient", "a_index"),
    }
    public = {
        name
        for module in (jsd_kernels, jsd_topk, jsd_product, softmax, gradients, sums, vectors)
        for name, f in vars(module).items()
        if hasattr(f, "params") and f.__module__ == module.__name__ and not name.startswith("_")
    }
    assert public <= {kernel for kernel, _ in found}


# --------------------------------------------------------------------------------------------- which kernels calls take


def names(**options):
    """By a plan that keeps some exponentials and computes some again."""
    with mixed_plan():
        return {key[0] for key in kinds([partial(head, 300, **HEAD | options)])}


SOFTMAX, GRADIENT, APART = "softmax_staggered", "gradient_staggered", "hidden_apart"


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({"bias": True}, set()),
        ({"softcap": 30.0}, set()),
        ({"turned": True}, set()),
        ({"labels": "dense"}, set()),
        ({"label_smoothing": 0.1}, {SOFTMAX}),
        ({"label_smoothing": 0.1, "class_weight": "classes"}, set()),
        ({"hidden": 4160}, set()),
        ({"hidden": 896}, {APART}),
        ({"hidden": 576}, {APART}),
        ({"hidden": 576, "turned": True}, set()),
        ({"return_stats": True}, {GRADIENT}),
        ({"class_weight": "classes"}, {GRADIENT, SOFTMAX}),
        ({"z_loss": 1e-4, "logit_scale": 0.5}, {GRADIENT, SOFTMAX}),
    ],
    ids=lambda x: "-".join(sorted(x)),
)
def test_what_kernels_in_gluon_take(options, taken):
    assert names(**options) & {SOFTMAX, GRADIENT, APART} == taken


def test_attention_has_enough_named_barriers():
    assert max(x.groups for x in attention_launches.BLOCKS.values()) <= handoff.MOST_GROUPS.value
    assert max(x.stages for x in attention_launches.BLOCKS.values()) <= handoff.MOST_STAGES.value
    assert handoff.OF_VALUES.value + handoff.MOST_STAGES.value <= 16


@pytest.mark.parametrize(("gpu", "sizes"), [(H100, (8, 64, 72, 128, 136, 192, 200, 256)), (A100, (8, 64, 72, 128))])
def test_another_length_is_no_other_kernel_of_attention(gpu, sizes):
    """Nor is another batch, and heads of up to 64 numbers have one, larger ones another."""

    def made(tokens, batch, size):
        how = {"heads": 4, "key_heads": 2, "mask": CAUSAL, "batch": batch, "size": size, "value_size": min(size, 128)}
        found = kinds([partial(attended, tokens, **how)], gpu)
        own = size % 64 and ("gradient_rows", "rounded_sums", *BY_TILES)  # those of a size
        return {key for key in found if not own or key[0] not in own}

    for size in sizes:
        expected = made(2048, 1, next(x for x in (64, 128, 192, 256) if x >= size))
        for tokens, batch in ((1, 1), (16, 3), (333, 16), (4096, 2)):
            assert made(tokens, batch, size) <= expected


# ---------------------------------------------------------------------------------------------------- between the ranks


@pytest.mark.parametrize("device", [H100, *(pytest.param(d, marks=pytest.mark.slow) for d in (A100, ADA))], ids=str)
def test_kernels_between_ranks(device):
    """Forward's product, and x's gradient with blocks that end within a tile."""
    ranks, n, c = 4, 1024, 256
    words = {"head": (between_ranks.HEAD, torch.int32), "addresses": (ranks + 1, torch.int64)}
    at = between_ranks.Meeting(2, ranks, *(blank(size, dtype=dtype) for size, dtype in words.values()), 600 * 10**6)
    with mock.patch.object(between_ranks, "describe", return_value=device):
        found = [
            between_ranks.gated_product(at, blank(t, c), blank(ranks, t, c), w, blank(n), blank(ranks * t, n))
            for t, w in ((512, blank(n, c).t()), (500, blank(c, n)))
        ] + [
            between_ranks.adding_product(at, blank(t, c), w, blank(n), blank(ranks, t, n, dtype=dtype), blank(t, n))
            for t, w, dtype in ((512, blank(n, c).t(), F32), (500, blank(c, n), torch.bfloat16))
        ]
    found += [between_ranks.meet(at, clear=True), between_ranks.meet(at)]
    found += [between_ranks.arrive(at, at.flags(1), blank(c), 4)]
    assert wrong(found, device) == []
    for i, launch in enumerate(found):
        ptx = compiled(launch, device.capability).ptx
        assert "ld.acquire.sys.global" in ptx
        assert "st.release.sys.global" in ptx
        assert "multimem" not in ptx
        assert ("fence.proxy.async.global" in ptx) == (device is H100 and i < 2)


def test_a_barrier_that_nothing_uses():
    source = GluonASTSource(trial.product, {"x": f"tensordesc<bf16[64, 64],{trial.LAYOUT!r}>"}, {}, {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert len(unused_barriers(made.asm["ttgir"])) == 1  # `empty` of `new_barriers`
