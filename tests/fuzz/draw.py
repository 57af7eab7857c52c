"""Draws random calls.  A call is a dictionary of plain values, each from the values that its op's table allows.

Simpler values stand first in a table: Hypothesis simplifies a failing call towards them.  Imports no framework.
"""

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from hypothesis import strategies as st

from onchip.ops.attention.cases import KINDS

Call = Mapping[str, Any]
Table = Mapping[str, Sequence[Any]]

_SHAPES = ((1,), (2,), (), (5,), (0,), (2, 3), (17,), (2, 0, 3), (1, 33, 2), (64,), (130,), (257,))
_SIZES = (1, 2, 3, 8, 31, 64, 136)
_VOCABS = (2, 1, 3, 5, 70, 128, 513, 1000, 2049)
_NO, _YES = (False, True), (True, False)
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
# Of groups: some are empty, all rows in one, many of a few rows, none at all.
_GROUPS = ((1,), (3,), (0,), (2, 1), (5, 0, 3), (0, 0, 7), (0, 0, 0), (17, 130, 1), (0, 257, 0, 0), (64, 64, 128),
           tuple(i % 4 for i in range(70)))  # fmt: skip
_STRIDES = ("plain", "sliced", "transposed", "strided")

_ANY: Table = {
    "dtype": ("float32", "bfloat16", "float16"),
    "seed": range(1000),
    "frozen": range(8),  # bit by bit, which of the tensors need no gradient
    "again": _NO,
    "twice": _NO,
}
_EVERY: Table = {"shape": _SHAPES, **_ANY}
_LABELS: Table = {
    "label_dtype": _INTEGERS,
    "ignore_index": (-100, -1, 0, 7),
    "ignored": (0.0, 0.3, 1.0),
    "poison": _NO,
}
_LOGITS: Table = {
    "logit_std": (1.0, 0.02, 30.0),
    "logit_offset": (0.0, 100.0),
    "masked": (0, 1, 40),
    "softcap": (None, 1.0, 30.0),  # so many times the usual size of the largest logits
    "logit_scale": (1.0, 0.25, 2.0),
    "temperature": (1.0, 0.5, 3.0),
    "token_temperature": _NO,
}
_REDUCED: Table = {
    "reduction": ("mean", "sum", "none"),
    "normalizer": (None, 7.0),
    "token_weight": _NO,
    "scratch": (None, 1.0, 1.5, 4.0),  # so many times the least
}
# A smoothing of 1 is left out: softmax minus a constant then cancels, and has no digits where logits are small.
_LOSS: Table = {**_REDUCED, "label_smoothing": (0.0, 0.1, 0.6), "z_loss": (0.0, 1e-3), "return_stats": _NO,
                "class_weight": _NO}  # fmt: skip
_HEAD: Table = {"hidden": _SIZES, "vocab": _VOCABS, "bias": _NO}

# Masks that have a meaning where there are not as many queries as keys; and all.
_ANY_SIZES = ("full", "causal", "causal, last sees last", "window of both sides")
MASKS = (*_ANY_SIZES, *(x for x in KINDS if x not in _ANY_SIZES))

TABLES: Mapping[str, Table] = {
    "linear_cross_entropy": {
        **_EVERY, **_HEAD, **_LABELS, **_LOGITS, **_LOSS, "strategy": ("auto", "stash", "recompute")
    },
    "cross_entropy": {**_EVERY, "vocab": _VOCABS, **_LABELS, **_LOGITS, **_LOSS},
    "linear_log_probs": {
        **_EVERY, **_HEAD, **_LABELS, **_LOGITS, "ids": (0, 1, 2, 5), "ignored_ids": (0.0, 0.4), "entropy": _NO,
        "lse": _NO, "top1": _NO, "mean_logits": _NO, "log_sum_sq_probs": _NO, "scratch": _REDUCED["scratch"],
    },
    "linear_jsd": {
        **_EVERY, **_HEAD, **_LABELS, **_REDUCED, "teacher_hidden": (0, 5, 40), "student": ("hidden", "logits"),
        "teacher": ("hidden", "logits", "tail", "truncated", "renormalised"), "logit_std": (1.0, 0.02, 30.0),
        "logit_offset": (0.0, 100.0), "noise": (None, 0.05, 0.0), "padded": _NO, "masked": (0, 1, 40),
        "beta": (0.5, 0.0, 1.0, 0.1, 0.9), "temperature": (1.0, 0.5, 3.0), "temperature_squared": _NO,
        "hard_weight": (0.0, 0.3), "teacher_grad": _NO,
    },
    "fp8_linear": {
        **_EVERY, "n": (1, 5, 31, 128, 136, 260), "k": (1, 8, 31, 128, 257), "bias": _NO, "grad_std": (1.0, 1e-20),
        "spread": (0.0, 4.0), "zeros": (0.0, 0.5), "grad_dtype": ("e4m3", "e5m2"), "scale": ("float32", "power_of_two"),
    },
    "grouped_matmul": {
        **_ANY, "frozen": range(16), "sizes": _GROUPS, "tail": (0, 1, 20), "n": (1, 2, 31, 64, 128, 136, 192),
        "k": (1, 8, 31, 128, 136), "weight_layout": ("gnk", "gkn"), "offsets": _NO, "index_dtype": ("int32", "int64"),
        "bias": _NO, "row_scale": _NO, "others_dtype": (None, "float32"), "activation": (None, "swiglu"),
        "gate_up": ("concatenated", "interleaved"), "source_rows": (None, 1, 5, 40), "num_rows": (None, 1, 9, 300),
        "poison": _NO,
    },
    "attention": {
        **_ANY, "frozen": range(16), "mask": MASKS, "batch": (1, 2, 3), "queries": (5, 1, 0, 16, 33, 70, 129),
        "keys": (None, 1, 0, 5, 40, 130), "key_heads": (1, 2, 3), "group": (1, 2, 3, 7), "size": (8, 1, 16, 31, 64),
        "value_size": (8, 1, 16, 24), "std": (1.0, 0.1, 4.0), "sinks": _NO, "softcap": (None, 5.0, 50.0),
        "scale": (None, 1.0, 0.05), "layout": ("bthd", "bhtd"), "lse": _NO,
    },
}  # fmt: skip
_TORCH: Table = {
    "strides": _STRIDES, "weight_strides": _STRIDES, "constant_strides": ("plain", "strided"),
    "upstream_strides": ("plain", "strided", "expanded"), "autocast": _NO, "check_inputs": _NO,
}  # fmt: skip
_JAX: Table = {"jit": _YES, "traced": _NO}
# Of one front end alone.
_MORE: Mapping[tuple[str, str], Table] = {
    ("torch", "linear_cross_entropy"): {"precision": ("full", "fp8"), "weight_grad_out": _NO},
    ("torch", "cross_entropy"): {"inplace_backward": _NO},
    ("torch", "fp8_linear"): {"weight_grad_out": _NO},
    ("torch", "grouped_matmul"): {"weight_grad_out": _NO},
    ("torch", "attention"): {"scratch": _REDUCED["scratch"]},
    ("jax", "linear_cross_entropy"): {"weight_layout": ("vh", "hv")},
    ("jax", "linear_log_probs"): {"weight_layout": ("vh", "hv")},
    ("jax", "linear_jsd"): {"weight_layout": ("vh", "hv")},
    ("jax", "fp8_linear"): {"weight_layout": ("nk", "kn")},
}


def table(framework: str, op: str) -> Table:
    """What each value of a call may be, simpler ones first."""
    return {**TABLES[op], **(_TORCH if framework == "torch" else _JAX), **_MORE.get((framework, op), {})}


_ALWAYS = ("shape", "hidden", "vocab", "seed", "sizes", "n", "k", "mask", "queries", "size")


@st.composite
def calls(draw: Any, targets: Sequence[tuple[str, str, str]]) -> Call:
    """A legal call of one of these (framework, device, op), by a backend that can run it.

    Half of its values are the simplest, so that each of the others meets many combinations.
    """
    framework, device, op = draw(st.sampled_from(targets))
    call = {"framework": framework, "device": device, "op": op, "backend": "auto"}
    for name, values in table(framework, op).items():
        some = st.sampled_from(values)
        call[name] = draw(some if name in _ALWAYS else st.just(values[0]) | some)
    call = legal(call)
    refusals = import_module(f"onchip.ops.{op}.checks").plain_refusals
    reasons = refusals(device, call["dtype"], framework, call)
    return legal(
        {**call, "backend": draw(st.sampled_from(["auto", *(x for x, why in reasons.items() if why is None)]))}
    )


def legal(call: Call) -> Call:
    """The call with what doesn't go together left out."""
    c = dict(call)

    def without(*names: str) -> None:
        c.update({name: table(c["framework"], c["op"])[name][0] for name in names if name in c})

    vocab, op = c.get("vocab", 0), c["op"]
    if op == "attention":
        return _legal_attention(c, without)
    tokens = sum(c["sizes"]) + c["tail"] if op == "grouped_matmul" else math.prod(c["shape"])
    if c.get("reduction") != "mean":
        without("normalizer")
    if c.get("token_temperature"):
        without("temperature")
    if c.get("precision") == "fp8":
        # Its noise is relative to the logits: what is asked of it holds for logits of about 1, not of few products.
        without("logit_std", "logit_offset", "softcap", "logit_scale", "temperature", "autocast")
        without("token_temperature", "masked")
        c["hidden"] = max(c["hidden"], 31)
        c["vocab"] = vocab = vocab if vocab == 1 else max(vocab, 70)
        c["strategy"] = "stash" if c["strategy"] == "recompute" else c["strategy"]
        c["backend"] = "auto"
        if c["reduction"] == "none":  # its bias gets no gradient
            c["bias"] = False
    # Entries out of the vocabulary: labels need others; tanh would let them in, and a mean over them is infinite.
    if vocab <= 2 * c.get("masked", 0) or c.get("softcap") or c.get("label_smoothing"):
        without("masked")
    if c.get("dtype") == "float16" or c.get("softcap"):
        without("logit_offset")  # whose rounding leaves no digits of what float16 or tanh makes of it
    if op == "linear_jsd":
        _legal_jsd(c, without)
        vocab += 8 * c["padded"]
    if "label_dtype" in c:
        unsigned, bits = c["label_dtype"].startswith("u"), int(c["label_dtype"].strip("uint"))
        if (c["ignored"] or c.get("ignored_ids")) and unsigned and c["ignore_index"] < 0:
            c["ignore_index"] = 0
        if vocab > 2 ** (bits - (not unsigned)):
            without("label_dtype")
    if c.get("autocast"):  # to bfloat16
        c["dtype"] = "bfloat16"
    if op == "fp8_linear" and c["dtype"] == "float16":  # which holds no numbers so small or so far apart
        without("grad_std", "spread")
    if op == "grouped_matmul":
        if c["activation"] is None:
            without("gate_up")
        elif c["n"] % 2:
            c["n"] = 2
        if c.get("upstream_strides") == "expanded":
            without("poison")  # it would be everywhere
    if tokens == 0:  # a gradient of nothing depends on nothing
        without("twice")
    return c


def _legal_attention(c: dict[str, Any], without: Any) -> Call:
    if c["keys"] is None or c["mask"] not in _ANY_SIZES:
        c["keys"] = c["queries"]
    c["heads"] = c["key_heads"] * c["group"]
    without("traced")  # its numbers are Python's
    if c.get("autocast"):  # to bfloat16
        c["dtype"] = "bfloat16"
    if 0 in (c["queries"], c["keys"]):  # a gradient of nothing depends on nothing
        without("twice")
    return c


def _legal_jsd(c: dict[str, Any], without: Any) -> None:
    if c["student"] == "logits":
        without("teacher_hidden", "bias", "logit_offset", "weight_layout")
        c["teacher"] = "logits" if c["teacher"] == "hidden" else c["teacher"]
    if c["teacher"] in ("tail", "truncated", "renormalised"):
        c["vocab"] = max(c["vocab"], 70)  # eight entries are known, and the rest are to have a part
        # What is left of 1 beside the known ones has no digits where those are nearly all.
        c["logit_std"] = min(c["logit_std"], 1.0)
        without("teacher_grad", "masked", "noise", "padded")
        c["backend"] = "auto"
    if c["beta"] in (0.0, 1.0):
        without("masked")  # infinite where one model excludes what the other doesn't
    if c["noise"] is not None:
        c["teacher_hidden"] = 0
        without("padded", "bias", "masked", "logit_offset", "strides", "weight_strides")
    if c["teacher"] != "hidden":
        without("teacher_hidden")
        if c["teacher"] == "logits" and c["student"] == "hidden":
            without("noise")
            c["backend"] = "auto"
    if c["hard_weight"] and c["vocab"] <= 2 * c["masked"]:
        without("masked")
