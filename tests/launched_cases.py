"""The calls whose launches are in tests/manifests: every op of PyTorch that has kernels, with its options."""

import contextlib
from functools import partial

import torch
import torch.distributed as dist

from launched import recorded
from onchip import masks
from onchip.attention.masks import mask_arrays
from onchip.ops.attention import cases as attention_cases
from onchip.ops.cross_entropy import checks as logits_cases
from onchip.ops.fp8_linear import cases as fp8_cases
from onchip.ops.grouped_matmul import cases as grouped_cases
from onchip.ops.linear_cross_entropy import checks as head_cases
from onchip.ops.linear_jsd import checks as jsd_cases
from onchip.ops.linear_log_probs import checks as log_probs_cases
from onchip.torch import (
    TopK,
    all_gather_matmul,
    attention,
    cross_entropy,
    fp8_linear,
    grouped_matmul,
    jsd,
    linear_cross_entropy,
    linear_jsd,
    linear_log_probs,
    log_probs,
    matmul_reduce_scatter,
)

BF16, F32, INT = torch.bfloat16, torch.float32, torch.int64
HEAD = {"hidden": 2048, "vocab": 128256}
# What a loss may be asked for beside its labels; numbers stand for tensors with so many entries per token or class.
OPTIONS = {
    "none": {"reduction": "none"},
    "sum": {"reduction": "sum"},
    "normalizer": {"normalizer": 100.0},
    "softcap": {"softcap": 30.0},
    "scale and temperature": {"logit_scale": 0.5, "temperature": "each"},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-4},
    "class weights": {"class_weight": "classes"},
    "class weights and smoothing": {"class_weight": "classes", "label_smoothing": 0.1},
    "token weights": {"token_weight": "each", "reduction": "none"},
    "statistics": {"return_stats": True},
    "shifted": {"shift": True},
    "everything": {
        "class_weight": "classes", "token_weight": "each", "temperature": "each", "label_smoothing": 0.1,
        "z_loss": 1e-4, "softcap": 30.0, "return_stats": True,
    },
}  # fmt: skip
OF_HEADS = {
    "frozen": {"frozen": True},
    "bias": {"bias": True},
    "bias and everything": {"bias": True} | OPTIONS["everything"],
    "turned weight": {"turned": True},
    "float32 weight": {"weight_dtype": F32},
    "recompute": {"strategy": "recompute"},
    "stash": {"strategy": "stash"},
    "little scratch": {"scratch_bytes": 128 << 20},
    "added to the caller's": {"add": True},
    "float16": {"dtype": torch.float16},
}
LABELS = ("topk", "dense")


def blank(*shape, dtype=BF16, grad=False):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def leaf(*shape, dtype=BF16):
    return blank(*shape, dtype=dtype, grad=True)


def _options(given, tokens, vocab, options):
    """Options whose tensors are named as given ones."""
    made = {}
    for name, x in options.items():
        if x in ("each", "classes") and isinstance(x, str):
            x = given[name] = blank(tokens if x == "each" else options.get("vocab_size", vocab), dtype=F32)
        made[name] = x
    return made


def _labels(given, tokens, vocab, labels, ids=8):
    if labels == "dense":
        given["target"] = blank(tokens, vocab)
        return given["target"]
    given["target"] = blank(tokens, *([ids] if labels == "topk" else []), dtype=INT)
    if labels is None:
        return given["target"]
    given["probs"] = blank(tokens, ids, dtype=F32)
    return TopK(given["target"], given["probs"], "probs", "truncated")


def _teacher(given, tokens, rest, ids=8):
    """A top-k teacher, if there is a word for the rest."""
    if rest is None:
        return None
    given["ids"], given["values"] = blank(tokens, ids, dtype=INT), blank(tokens, ids, dtype=F32)
    return TopK(given["ids"], given["values"], "log_probs", rest)


def head(
    tokens, *, hidden, vocab, op=linear_cross_entropy, labels=None, ids=None, frozen=False, bias=False, turned=False,
    dtype=BF16, weight_dtype=None, add=False, spills=False, backend="triton", **options,
):  # fmt: skip
    weight = blank(*((hidden, vocab) if turned else (vocab, hidden)), dtype=weight_dtype or dtype)
    weight = (weight.T if turned else weight).requires_grad_(not frozen)
    given = {"hidden": leaf(tokens, hidden, dtype=dtype), "weight": weight}
    if bias:
        given["bias"] = leaf(vocab, dtype=dtype)
    more = _options(given, tokens, vocab, options)
    if add:
        more["weight_grad_out"] = given["weight_grad_out"] = blank(vocab, hidden, dtype=F32)
    named = {name: given[name] for name in ("hidden", "weight", "bias") if name in given}
    if op is linear_log_probs:
        named["ids"] = given["ids"] = blank(tokens, *([ids] if ids else []), dtype=INT)
    else:
        named["target"] = _labels(given, tokens, vocab, labels)
    return recorded(op, given, named | more | {"backend": backend}, spills=spills)


def of_logits(tokens, *, vocab, op=cross_entropy, sliced=0, labels=None, ids=None, dtype=BF16, spills=False, **options):
    wide = leaf(tokens, vocab + sliced, dtype=dtype)
    given = {"logits": wide}
    more = _options(given, tokens, vocab, options)
    named = {"logits": wide[:, :vocab] if sliced else wide}
    if options.get("inplace_backward"):
        named["logits"] = given["computed"] = wide.clone()
    if op is jsd:
        teacher = _teacher(given, tokens, labels)
        if teacher is None:
            given["teacher"] = blank(tokens, vocab, dtype=dtype, grad=options.get("teacher_grad", False))
        named = {"student_logits": wide, "teacher_logits": given.get("teacher"), "teacher_topk": teacher}
        if "hard_weight" in options:
            named["target"] = given["target"] = blank(tokens, dtype=INT)
        return recorded(jsd, given, named | more | {"backend": "triton"})
    if op is log_probs:
        named["ids"] = given["ids"] = blank(tokens, *([ids] if ids else []), dtype=INT)
    else:
        named["target"] = _labels(given, tokens, vocab, labels)
    return recorded(op, given, named | more | {"backend": "triton"}, spills=spills)


def two_heads(
    tokens, *, hidden, vocab, teacher_hidden=0, bias=False, hard=False, rest=None, turned=False, dtype=BF16, **options
):
    def model(who, hidden, grad):
        rows, columns = (hidden, vocab) if turned else (vocab, hidden)
        weight = blank(rows, columns, dtype=dtype)
        weight = (weight.T if turned else weight).requires_grad_(grad)
        return {f"{who}_hidden": blank(tokens, hidden, dtype=dtype, grad=grad), f"{who}_weight": weight}

    named, topk = model("student", hidden, True), {}
    known = _teacher(topk, tokens, rest)
    if known is None:
        named |= model("teacher", teacher_hidden or hidden, options.get("teacher_grad", False))
    if bias:
        named |= {"student_bias": leaf(vocab, dtype=dtype), "teacher_bias": blank(vocab, dtype=dtype)}
    if hard:
        named["target"] = blank(tokens, dtype=INT)
    given = named | topk
    more = _options(given, tokens, vocab, options) | {"teacher_topk": known}
    return recorded(linear_jsd, given, named | more | {"backend": "triton"})


def grouped(tokens, *, model, way="plain", turned=False, bias=False, sizes="group_sizes", dtype=BF16, **options):
    groups, n, k = model.groups, model.n, model.k
    weight = leaf(*((groups, k, n) if turned else (groups, n, k)), dtype=dtype)
    given = {"x": leaf(tokens, k, dtype=dtype), "weight": weight, sizes: blank(groups, dtype=torch.int32)}
    more = {"weight_layout": "gkn"} if turned else {}
    if bias:
        given["bias"] = leaf(groups, n, dtype=dtype)
    if way in ("rows", "scaled rows"):
        given["rows"] = blank(8 * tokens, dtype=torch.int32)
        given |= {"row_scale": leaf(8 * tokens, dtype=F32)} if way == "scaled rows" else {}
    elif way == "scattered":
        given["x"] = leaf(8 * tokens, k, dtype=dtype)
        given |= {"scatter_rows": blank(8 * tokens, dtype=torch.int32), "row_scale": leaf(8 * tokens, dtype=F32)}
        more["num_rows"] = tokens
    elif way == "added":
        given["weight_grad_out"] = blank(*weight.shape, dtype=F32)
    return recorded(grouped_matmul, given, given | more | options | {"backend": "triton"})


def quantised(tokens, *, n, k, add=False, bias=False, backend="triton", **options):
    given = {"x": leaf(tokens, k), "weight": leaf(n, k)}
    if bias:
        given["bias"] = leaf(n)
    if add:
        given["weight_grad_out"] = blank(n, k, dtype=F32)
    return recorded(fp8_linear, given, given | options | {"backend": backend})


def attended(
    tokens, *, mask, keys=None, batch=1, heads=32, key_heads=8, size=128, value_size=128, sinks=False, packed=False,
    dtype=BF16, wanted="qkv", layout="bthd", lse=False, **options,
):  # fmt: skip
    """`packed`: q, k and v are columns of one product."""
    keys = tokens if keys is None else keys
    heads_of = {"q": (tokens, heads, size), "k": (keys, key_heads, size), "v": (keys, key_heads, value_size)}
    shapes = {x: (batch, *((t, h, d) if layout == "bthd" else (h, t, d))) for x, (t, h, d) in heads_of.items()}
    given = {x: blank(*shape, dtype=dtype, grad=x in wanted) for x, shape in shapes.items()}
    named = dict(given)
    if packed:
        given = {"qkv": leaf(batch, tokens, (heads + 2 * key_heads) * size, dtype=dtype)}
        parts = given["qkv"].split([h * size for _, h, _ in heads_of.values()], 2)
        named = {x: y.unflatten(2, (-1, size)) for x, y in zip("qkv", parts, strict=True)}
    if sinks:
        named["sinks"] = given["sinks"] = leaf(heads, dtype=F32)
    given |= {f"mask{i}": x for i, x in enumerate(mask_arrays(mask))}
    more = {"layout": layout, "return_lse": lse, "backend": "triton"}
    return recorded(attention, given, {**named, "mask": mask, **more, **options})


@contextlib.contextmanager
def group_of(ranks):
    """This process as the first of so many, which exchange nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def sharded(tokens, *, call, vocab, ranks=1, start=0, **options):
    with group_of(ranks) as group:
        whole = {"vocab_group": group, "vocab_start": start, "vocab_size": vocab}
        return call(tokens, vocab=vocab // ranks, **whole, **options)


def exchanged(tokens, *, op, n, k, ranks=4, bias=False, add=False, **options):
    """Of `tokens` on each rank, which has its part of the weight; by collectives of the process group."""
    gathers = op is all_gather_matmul
    rows, n, k = (tokens, n // ranks, k) if gathers else (ranks * tokens, n, k // ranks)
    given = {"x_shard" if gathers else "x": leaf(rows, k), "weight": leaf(n, k)}
    if bias:
        given["bias"] = leaf(n)
    if add:
        given["weight_grad_out"] = blank(n, k, dtype=F32)
    with group_of(ranks) as group:
        return recorded(op, given, {**given, "group": group, **options})


# --------------------------------------------------------------------------------------------------------- all cases


def _suite(cases, **more):
    for case in cases:
        dtype = {"weight_dtype": F32} if getattr(case, "autocast", False) else {}
        frozen = {"frozen": True} if getattr(case, "frozen", False) else {}
        run = partial(head, hidden=case.hidden, vocab=case.vocab, **more, **dtype, **frozen, **case.options)
        for tokens in (case.tokens, 333):
            yield f"{case.name}: {tokens}", partial(run, tokens)


def _each(run, named, tokens, **always):
    for name, options in named.items():
        for t in tokens:
            yield f"{name}: {t}", partial(run, t, **always, **options)


def _heads():
    yield from _suite(head_cases.USERS)
    yield from _each(head, OPTIONS, (500,), **HEAD)
    yield from _each(head, {x: OPTIONS[x] for x in ("none", "class weights", "everything")} | OF_HEADS, (8192,), **HEAD)
    small = {f"small {name}": options for name, options in OPTIONS.items()}
    yield from _each(head, small, (4096,), hidden=576, vocab=49152)
    yield from _each(head, {f"awkward {k}": v for k, v in OF_HEADS.items()}, (77,), hidden=100, vocab=1001)


def _fp8():
    fp8 = {name: x for name, x in OPTIONS.items() if name != "none"} | {"bias": {"bias": True}}
    fp8 |= {"none": {"reduction": "none"}, "frozen": {"frozen": True}, "added to the caller's": {"add": True}}
    yield from _each(head, fp8, (512, 8192), **HEAD, precision="fp8")


def _soft():
    for labels in LABELS:
        for name, options in (OPTIONS | {"plain": {}, "frozen": {"frozen": True}, "bias": {"bias": True}}).items():
            if name not in ("shifted",):
                yield f"{labels} {name}: 2048", partial(head, 2048, **HEAD, labels=labels, **options)
        yield f"{labels} plain: 300", partial(head, 300, **HEAD, labels=labels)
        yield f"{labels} spilled: 2048", partial(head, 2048, **HEAD, labels=labels, spills=True)
    for name in ("plain", "everything"):
        yield (
            f"fp8 topk {name}: 2048",
            partial(head, 2048, **HEAD, labels="topk", precision="fp8", **OPTIONS.get(name, {})),
        )


def _log_probs():
    yield from _suite(log_probs_cases.SUITES["cuda"], op=linear_log_probs)
    ways = {
        "four ids": {"ids": 4}, "softcap": {"softcap": 30.0}, "entropy and lse": {"entropy": True, "lse": True},
        "temperature": {"temperature": "each"}, "bias": {"bias": True}, "frozen": {"frozen": True},
        "statistics": dict.fromkeys(("lse", "top1", "mean_logits", "log_sum_sq_probs"), True),
        "float32 weight": {"weight_dtype": F32},
    }  # fmt: skip
    yield from _each(head, ways, (500, 8192), **HEAD, op=linear_log_probs)


def _jsd():
    for case in (*jsd_cases.SUITES["cuda"], *jsd_cases.SUITES["others"]):
        sizes = {"hidden": case.hidden, "teacher_hidden": case.teacher_hidden, "vocab": case.vocab}
        for tokens in (case.tokens, 333):
            yield f"{case.name}: {tokens}", partial(two_heads, tokens, **sizes, **case.options)
    ways = {
        "none": {"reduction": "none"}, "bias": {"bias": True}, "hard labels": {"hard": True, "hard_weight": 0.3},
        "temperature": {"temperature": 2.0, "temperature_squared": True},
        "token weights": {"token_weight": "each"},
    }  # fmt: skip
    yield from _each(two_heads, ways, (500, 4096), **HEAD)
    yield "topk: 500", partial(two_heads, 500, rest="tail", hard=True, hard_weight=0.3, **HEAD)


def _logits():
    for case in logits_cases.SUITES["cuda"]:
        yield f"{case.name}: {case.tokens}", partial(of_logits, case.tokens, vocab=case.vocab, sliced=case.sliced)
    more = {"inplace": {"inplace_backward": True}, "float32": {"dtype": F32}, "sliced": {"sliced": 128}, "plain": {}}
    yield from _each(of_logits, OPTIONS | more, (500, 8192), vocab=128256)
    yield from _each(of_logits, {f"short {k}": v for k, v in OPTIONS.items()}, (4096,), vocab=1000)
    for labels in LABELS:
        for name in ("plain", "none", "softcap", "smoothing", "class weights", "everything"):
            options = OPTIONS.get(name, {})
            yield f"{labels} {name}: 4096", partial(of_logits, 4096, vocab=128256, labels=labels, **options)


def _logits_log_probs():
    ways = {"plain": {}, "entropy": {"entropy": True}, "four ids": {"ids": 4}, "softcap": {"softcap": 30.0},
            "temperature": {"temperature": "each"},
            "statistics": dict.fromkeys(("lse", "top1", "mean_logits", "log_sum_sq_probs"), True)}  # fmt: skip
    yield from _each(of_logits, ways, (500, 8192), vocab=128256, op=log_probs)


def _logits_jsd():
    ways = {"plain": {}, "beta 0": {"beta": 0.0}, "beta 1": {"beta": 1.0}, "none": {"reduction": "none"},
            "temperature": {"temperature": 2.0}, "token weights": {"token_weight": "each"}}  # fmt: skip
    yield from _each(of_logits, ways, (500, 8192), vocab=128256, op=jsd)
    yield "topk: 500", partial(of_logits, 500, vocab=128256, op=jsd, labels="tail")


def _grouped():
    swiglu = {"activation": "swiglu"}
    for model in grouped_cases.MODELS:
        for name, options in {"plain": {}, "swiglu": swiglu, "few rows": {}}.items():
            tokens = 200 if name == "few rows" else model.tokens
            yield f"{model.name} {name}: {tokens}", partial(grouped, tokens, model=model, **options)
    ways = {
        "rows": {"way": "rows"} | swiglu, "scattered": {"way": "scattered"}, "added": {"way": "added"},
        "turned": {"turned": True}, "bias": {"bias": True}, "interleaved": swiglu | {"gate_up": "interleaved"},
        "fp8": {"precision": "fp8"}, "fp8 swiglu": {"precision": "fp8"} | swiglu,
        "fp8 rows": {"precision": "fp8", "way": "rows"},
    }  # fmt: skip
    yield from _each(grouped, ways, (500, 4096), model=grouped_cases.MODELS[-1])


def _linear():
    for case in fp8_cases.SUITES["cuda"]:
        yield f"{case.name}: {case.m}", partial(quantised, case.m, n=case.n, k=case.k)
    ways = {"plain": {}, "e5m2": {"grad_dtype": "e5m2"}, "powers of two": {"scale": "power_of_two"},
            "bias": {"bias": True}, "added": {"add": True}, "cuBLAS": {"backend": "scaled_mm"},
            "cuBLAS, added": {"backend": "scaled_mm", "add": True},
            "cuBLAS, bias": {"backend": "scaled_mm", "bias": True}}  # fmt: skip
    yield from _each(quantised, ways, (500, 8192), n=4096, k=14336)
    yield from _each(quantised, {f"awkward {k}": v for k, v in ways.items() if "backend" not in v}, (77,), n=131, k=521)


def _attention():
    def put(x):
        return blank(*x.shape, dtype=INT)

    for case in attention_cases.SUITES["cuda"]:
        sizes = {x: getattr(case, x) for x in ("batch", "heads", "key_heads", "size", "value_size", "sinks")}
        run = partial(attended, case.tokens, mask=attention_cases.bench_mask(case, put), **sizes)
        yield f"{case.name}: {case.tokens}", run
    for name, kind in attention_cases.KINDS.items():
        if name != "blocked":
            mask = kind.make(put, attention_cases.Drawn(2, 500, 500))
            yield f"{name}: 500", partial(attended, 500, batch=2, heads=4, key_heads=2, size=64, mask=mask)
    ways = {
        "softcap": {"softcap": 30.0}, "scale": {"scale": 0.5}, "heads first": {"layout": "bhtd"}, "lse": {"lse": True},
        "sinks and lse": {"sinks": True, "lse": True}, "float16": {"dtype": torch.float16}, "packed": {"packed": True},
        "queries' gradient": {"wanted": "q"}, "keys' gradient": {"wanted": "k"}, "no gradient": {"wanted": ""},
        "more keys": {"keys": 9000}, "a head of 40": {"size": 40, "value_size": 24}, "groups of 7": {"heads": 56},
        "heads of 64 within a bound": {"size": 64, "value_size": 64, "scratch_bytes": 1 << 25},
        "heads of 64, sinks and lse": {"size": 64, "value_size": 64, "sinks": True, "lse": True},
        "everything": {"softcap": 30.0, "scale": 0.5, "sinks": True, "lse": True, "layout": "bhtd", "batch": 3},
    }  # fmt: skip
    yield from _each(attended, ways, (333, 8192), mask=masks.Causal())
    wide = {
        "heads of 136": {"size": 136, "value_size": 72},
        "everything in wide heads": {"size": 192, **ways["everything"]},
        "heads of 256": {"size": 256, "value_size": 256},
        "everything in heads of 200": {"size": 200, "value_size": 72, **ways["everything"]},
    }
    yield from _each(attended, wide, (8192,), mask=masks.Tree(blank(8192, dtype=INT)))
    read = masks.Intervals(*(blank(1, 8192, dtype=torch.int32) for _ in range(3)))
    yield "lowered before: 8192", partial(attended, 8192, mask=read)


def _sharded():
    of_head = {"plain": {}, "everything": OPTIONS["everything"], "none": {"reduction": "none"}, "bias": {"bias": True},
               "topk": {"labels": "topk"}, "dense": {"labels": "dense"}, "fp8": {"precision": "fp8"},
               "log-probs": {"op": linear_log_probs, "entropy": True}}  # fmt: skip
    rows = {
        "plain": {},
        "smoothing": OPTIONS["smoothing"],
        "dense": {"labels": "dense"},
        "log-probs": {"op": log_probs, "entropy": True},
    }
    for ranks in (1, 2):
        for name, options in of_head.items():
            run = partial(sharded, 4096, call=head, ranks=ranks, hidden=2048, vocab=128256)
            yield f"head {name}, {ranks} ranks: 4096", partial(run, **options)
        for name, options in rows.items():
            run = partial(sharded, 4096, call=of_logits, ranks=ranks, vocab=128256)
            yield f"logits {name}, {ranks} ranks: 4096", partial(run, **options)
    # Where every rank knows the others' rows.
    even = partial(sharded, call=head, ranks=2, hidden=2048, vocab=128256, start=None)
    yield "head even, 2 ranks: 1024", partial(even, 1024)
    yield "head even, 2 ranks: 8192", partial(even, 8192)
    yield "head even everything, 2 ranks: 8192", partial(even, 8192, **OPTIONS["everything"])
    both = partial(sharded, 4096, ranks=2, vocab=128256)
    for beta in (0.0, 0.5):
        run = partial(both, call=two_heads, hidden=2048, hard=True, hard_weight=0.3, beta=beta)
        yield f"heads beta {beta}, 2 ranks: 4096", run
        yield f"logits beta {beta}, 2 ranks: 4096", partial(both, call=of_logits, op=jsd, beta=beta)
    few = partial(sharded, 500, ranks=2, vocab=128256)
    yield "topk head, 2 ranks: 500", partial(few, call=two_heads, hidden=2048, rest="tail", hard=True, hard_weight=0.3)
    yield "topk logits, 2 ranks: 500", partial(few, call=of_logits, op=jsd, labels="tail")


def _collective():
    ways = {
        "collective": {"backend": "collective"}, "ring": {"backend": "ring"},
        "ring, fp8": {"backend": "ring", "precision": "fp8"},
        "bias, added": {"backend": "collective", "bias": True, "add": True},
        "sums in bfloat16": {"backend": "collective", "reduce_dtype": BF16},
    }  # fmt: skip
    for op in (all_gather_matmul, matmul_reduce_scatter):
        named = {f"{op.__name__} {name}": options for name, options in ways.items()}
        if op is all_gather_matmul:
            named["all_gather_matmul kept"] = {"backend": "collective", "keep_gathered": True}
        yield from _each(partial(exchanged, op=op), named, (1024,), n=8192, k=4096)


FILES = {
    "linear_cross_entropy": _heads, "linear_cross_entropy_fp8": _fp8, "linear_cross_entropy_soft": _soft,
    "linear_log_probs": _log_probs, "linear_jsd": _jsd, "cross_entropy": _logits, "log_probs": _logits_log_probs,
    "jsd": _logits_jsd, "grouped_matmul": _grouped, "fp8_linear": _linear, "attention": _attention,
    "collective_matmul": _collective, "sharded": _sharded,
}  # fmt: skip
CASES = {file: dict(make()) for file, make in FILES.items()}
