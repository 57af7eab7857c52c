"""Hashes of what JAX makes from calls for an H100: Mosaic's kernels, and XLA's program around them, as text.

The text names no places in the source, and no numbers that a process counts.
"""

import re
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import sha256
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from onchip import masks
from onchip.attention.masks import mask_arrays, with_arrays
from onchip.frontend import jax_inputs
from onchip.jax import (
    TopK,
    attention,
    cross_entropy,
    fp8_linear,
    grouped_matmul,
    jsd,
    linear_cross_entropy,
    linear_jsd,
    linear_log_probs,
    log_probs,
    sharded_linear_cross_entropy,
    sharded_linear_jsd,
    sharded_linear_log_probs,
)
from onchip.kernels.triton import jax_front
from onchip.ops.attention import jax_op as attention_op
from onchip.ops.attention.cases import KINDS, Drawn
from onchip.ops.fp8_linear import jax_op as fp8_op
from onchip.ops.grouped_matmul import jax_op as grouped_op
from onchip.ops.linear_jsd import mosaic_walk as jsd_walk
from onchip.vocab.mosaic import op as mosaic_op
from onchip.vocab.rows import mosaic_op as mosaic_rows
from shard_map_lowering import readable

BF16, F32, INT = jnp.bfloat16, jnp.float32, jnp.int32
_NAME = re.compile(r"module @(\w+)")
_MODULE = re.compile(r'module = "((?:[^"\\]|\\.)*)"')


@contextmanager
def on_h100():
    """JAX's default device is a GPU that every kernel can run on."""
    real = jax_inputs.platform
    with ExitStack() as stack:
        for module in [x for name, x in sys.modules.items() if name.startswith("onchip.")]:
            if vars(module).get("platform") is real:
                stack.enter_context(mock.patch.object(module, "platform", return_value="gpu"))
        for module in (attention_op, fp8_op, grouped_op, jax_front, mosaic_op, mosaic_rows):
            stack.enter_context(mock.patch.object(module, "hopper_refusal", return_value=None))
        stack.enter_context(mock.patch.object(jsd_walk, "hopper_refusal", return_value=None))
        yield


def lowered(op, leaves, constants, options):
    """A line for each kernel, and one for the program, of a call and its gradients."""
    arguments = [{name: jax.ShapeDtypeStruct(*x) for name, x in given.items()} for given in (leaves, constants)]

    def call(leaves, constants):
        made = op(**leaves, **constants, **options)
        outputs = [x for x in jax.tree.leaves(made) if jnp.issubdtype(x.dtype, jnp.floating)]
        differentiable = outputs[:1] if options.get("return_stats") else outputs
        return sum(x.astype(F32).sum() for x in differentiable), made

    with on_h100():
        step = jax.jit(jax.value_and_grad(call, has_aux=True))
        text = step.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    lines = []

    def kernel(found):
        said = readable(found[1])
        lines.append(f"{_NAME.search(said)[1]} {_hash(said)}")
        return f'module = "{_hash(said)}"'

    text = re.sub(r'kernel_hash = "[^"]*"', "", _MODULE.sub(kernel, text))
    numbers = {}  # of functions, whose names are the source's
    text = re.sub(r"@(?!mosaic_gpu)[\w.]+", lambda x: f"@{numbers.setdefault(x[0], len(numbers))}", text)
    counted = Counter(re.findall(r"stablehlo\.(\w+)", text))
    return [*lines, f"program {_hash(text)}: {', '.join(f'{n} {name}' for name, n in sorted(counted.items()))}"]


def _hash(text):
    return sha256(text.encode()).hexdigest()[:16]


# --------------------------------------------------------------------------------------------------------- all cases

OPTIONS = {
    "plain": {},
    "none": {"reduction": "none"},
    "softcap": {"softcap": 30.0},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-4},
    "statistics": {"return_stats": True},
    "class weights": {"class_weight": True},
    "token weights": {"token_weight": True},
    "bias": {"bias": True},
}


def head(
    tokens,
    hidden,
    vocab,
    *,
    op=linear_cross_entropy,
    labels=None,
    ids=None,
    dtype=BF16,
    backend="mosaic_gpu",
    **options,
):
    turned = options.get("weight_layout") == "hv"
    leaves = {"hidden": ((tokens, hidden), dtype), "weight": ((hidden, vocab) if turned else (vocab, hidden), dtype)}
    constants = {}
    if options.pop("bias", False):
        leaves["bias"] = ((vocab,), dtype)
    for name, size in (("class_weight", vocab), ("token_weight", tokens)):
        if options.pop(name, False):
            constants[name] = ((size,), F32)
    if op in (linear_log_probs, sharded_linear_log_probs):
        constants["ids"] = ((tokens, ids) if ids else (tokens,), INT)
    else:
        _labels(constants, tokens, vocab, labels)
    return lowered(_with_labels(op), leaves, constants, {**options, "backend": backend})


def _labels(constants, tokens, vocab, labels):
    constants["target"] = {"dense": ((tokens, vocab), BF16), "topk": ((tokens, 8), INT), None: ((tokens,), INT)}[labels]
    if labels == "topk":
        constants["probs"] = ((tokens, 8), F32)


def _with_labels(op):
    def call(*, probs=None, target=None, **given):
        if target is not None:
            given["target"] = target if probs is None else TopK(target, probs, "probs", "truncated")
        return op(**given)

    return call


def of_logits(tokens, vocab, *, op=cross_entropy, labels=None, ids=None, **options):
    constants = {}
    for name, size in (("class_weight", vocab), ("token_weight", tokens)):
        if options.pop(name, False):
            constants[name] = ((size,), F32)
    name = "student_logits" if op is jsd else "logits"
    if op is jsd:
        constants["teacher_logits"] = ((tokens, vocab), BF16)
    elif op is log_probs:
        constants["ids"] = ((tokens, ids) if ids else (tokens,), INT)
    else:
        _labels(constants, tokens, vocab, labels)
    return lowered(_with_labels(op), {name: ((tokens, vocab), BF16)}, constants, options)


def two_heads(tokens, hidden, vocab, *, op=linear_jsd, **options):
    leaves = {"student_hidden": ((tokens, hidden), BF16), "student_weight": ((vocab, hidden), BF16)}
    constants = {"teacher_hidden": ((tokens, hidden), BF16), "teacher_weight": ((vocab, hidden), BF16)}
    return lowered(op, leaves, constants, options)


def with_teacher(op, tokens, leaves, **options):
    """With a top-k teacher."""

    def call(*, indices, values, **given):
        return op(**given, teacher_topk=TopK(indices, values, "log_probs", "tail"), **options)

    return lowered(call, leaves, {"indices": ((tokens, 64), INT), "values": ((tokens, 64), F32)}, {})


def grouped(tokens, *, way="plain", layout="gnk", bias=False, **options):
    """`way`: "rows" of x are gathered, products are "scattered", or "both"."""
    groups, n, k = 8, 512, 384
    leaves = {"x": ((tokens, k), BF16), "weight": ((groups, n, k) if layout == "gnk" else (groups, k, n), BF16)}
    constants = {"group_sizes": ((groups,), INT)}
    if bias:
        leaves["bias"] = ((groups, n), BF16)
    if way == "rows":
        constants["rows"] = ((2 * tokens,), INT)
    elif way == "both":
        constants |= {"rows": ((tokens,), INT), "scatter_rows": ((tokens,), INT)}
        leaves["row_scale"], options["num_rows"] = ((tokens,), F32), 300
    elif way == "scattered":
        constants["scatter_rows"], options["num_rows"] = ((tokens,), INT), tokens // 2
        leaves["row_scale"] = ((tokens,), F32)
    return lowered(grouped_matmul, leaves, constants, {"weight_layout": layout, **options})


def quantised(tokens, n, k, *, bias=False, weight_dtype=BF16, **options):
    weight = (n, k) if options.get("weight_layout") != "kn" else (k, n)
    leaves = {"x": ((tokens, k), BF16), "weight": (weight, weight_dtype)} | ({"bias": ((n,), BF16)} if bias else {})
    return lowered(fp8_linear, leaves, {}, options)


def attended(mask, *, heads=4, key_heads=2, size=64, sinks=False, tokens=300, **options):
    shapes = {"q": heads, "k": key_heads, "v": key_heads}
    order = 1 if options.get("layout") != "bhtd" else -1
    leaves = {name: ((2, *(tokens, h)[::order], size), BF16) for name, h in shapes.items()}
    if sinks:
        leaves["sinks"] = ((heads,), F32)
    numbers = {f"mask{i}": (x.shape, INT) for i, x in enumerate(mask_arrays(mask))}

    def call(*, q, k, v, sinks=None, **numbers):
        return attention(q, k, v, with_arrays(mask, iter(numbers.values())), sinks=sinks, **options)

    return lowered(call, leaves, numbers, {})


def sharded(op, run, *sizes, **options):
    """Over a mesh of one device."""
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
    return run(*sizes, op=op, vocab_axis="model", mesh=mesh, **options)


def _cases():
    for backend in ("mosaic_gpu", "xla"):
        for name, options in OPTIONS.items():
            yield f"linear_cross_entropy {backend} {name}", partial(head, 1024, 512, 32768, backend=backend, **options)
        run = partial(head, 1024, 512, 32768, backend=backend)
        yield f"linear_cross_entropy {backend} turned weight", partial(run, weight_layout="hv")
        yield f"linear_cross_entropy {backend} recompute", partial(run, strategy="recompute")
        yield f"linear_cross_entropy {backend} awkward", partial(head, 300, 192, 1088, backend=backend)
        yield f"linear_cross_entropy {backend} llama3.1-8b", partial(head, 4096, 4096, 128256, backend=backend)
        for labels in ("dense", "topk"):
            for name in ("plain", "smoothing", "softcap"):
                soft = partial(head, 300, 192, 1088, labels=labels, backend=backend, **OPTIONS[name])
                yield f"linear_cross_entropy {backend} {labels} {name}", soft
        for way in ("plain", "rows", "scattered"):
            for layout in ("gnk", "gkn"):
                name = f"grouped_matmul {backend} {way} {layout}"
                yield name, partial(grouped, 1000, way=way, layout=layout, backend=backend)
        swiglu = partial(grouped, 1000, way="rows", activation="swiglu", backend=backend)
        yield f"grouped_matmul {backend} swiglu", swiglu
        for name, options in {"plain": {}, "powers of two": {"scale": "power_of_two"}}.items():
            yield f"fp8_linear {backend} {name}", partial(quantised, 1024, 768, 640, backend=backend, **options)
        for name in ("causal", "causal documents", "tree"):
            mask = KINDS[name].make(jnp.asarray, Drawn(2, 300, 300))
            yield f"attention {backend} {name}", partial(attended, mask, backend=backend)
        more = {"heads": 6, "size": 128, "sinks": True, "softcap": 30.0, "return_lse": True}
        yield f"attention {backend} everything", partial(attended, masks.Window(99), backend=backend, **more)
    for backend in ("mosaic_gpu", "xla"):
        call = partial(sharded, sharded_linear_cross_entropy, head, 1024, 512, 4096, backend=backend)
        yield f"sharded_linear_cross_entropy {backend}", call
    for backend in ("mosaic_gpu", "xla"):
        call = partial(sharded, sharded_linear_log_probs, head, 512, 256, 4096, backend=backend)
        yield f"sharded_linear_log_probs {backend}", call
        call = partial(sharded, sharded_linear_jsd, two_heads, 512, 256, 4096, backend=backend)
        yield f"sharded_linear_jsd {backend}", call
    yield "fp8_linear xla e5m2", partial(quantised, 1024, 768, 640, grad_dtype="e5m2", backend="xla")
    of_losses = {name: options for name, options in OPTIONS.items() if name != "bias"}
    for backend in ("mosaic_gpu", "xla"):
        of_rows = partial(of_logits, 1024, 32768, backend=backend)
        for name, options in (of_losses | {labels: {"labels": labels} for labels in ("dense", "topk")}).items():
            yield f"cross_entropy {backend} {name}", partial(of_rows, **options)
        yield f"cross_entropy {backend} awkward", partial(of_logits, 300, 1001, backend=backend)
    for name, options in {"plain": {}, "entropy": {"entropy": True}, "four ids": {"ids": 4}}.items():
        for backend in ("mosaic_gpu", "xla"):
            of_rows = partial(of_logits, 1024, 32768, op=log_probs, backend=backend, **options)
            yield f"log_probs {backend} {name}", of_rows
            of_head = partial(head, 1024, 512, 32768, op=linear_log_probs, backend=backend, **options)
            yield f"linear_log_probs {backend} {name}", of_head
    for beta in (0.0, 0.5, 1.0):
        for backend in ("mosaic_gpu", "xla"):
            yield f"jsd {backend} {beta}", partial(of_logits, 1024, 32768, op=jsd, beta=beta, backend=backend)
            yield f"linear_jsd {backend} {beta}", partial(two_heads, 512, 256, 8192, beta=beta, backend=backend)
    student = {"student_hidden": ((512, 256), BF16), "student_weight": ((8192, 256), BF16)}
    for backend in ("mosaic_gpu", "xla"):
        logits = {"student_logits": ((1024, 32768), BF16)}
        yield f"jsd {backend} top-k", partial(with_teacher, jsd, 1024, logits, backend=backend)
        yield f"linear_jsd {backend} top-k", partial(with_teacher, linear_jsd, 512, student, backend=backend)
    yield "linear_jsd mosaic_gpu again", partial(two_heads, 4096, 256, 32768, backend="mosaic_gpu")


CASES = dict(_cases())
