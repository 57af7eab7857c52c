"""Cases of linear_cross_entropy with soft labels in JAX, and the oracle's results for the same numbers."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onchip.jax import TopK, linear_cross_entropy

# Of gradients: two roundings or three to 16 bits, of the logits' gradient, of hidden and of the result.
BOUNDS = {"bfloat16": 5e-3, "float16": 7e-4}
EVERYTHING = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "logit_scale": 0.5}


@dataclass(frozen=True)
class SoftCase:
    name: str
    tokens: int
    hidden: int
    vocab: int
    ids: int = 0
    """K, of which the last is the first once more; 0: every entry has a probability."""
    kind: str = "probs"
    labels: str = "float32"
    std: float = 1.0
    """Of logits."""
    peaked: bool = False
    """One entry has all of the label, and nearly all of the softmax."""
    masked: bool = False
    """Some entries, a whole tile among them, have a bias of -inf and no probability."""
    bias: bool = False
    weighed: bool = False
    """Tokens and classes have weights, some of them 0, and tokens a temperature each."""
    reduction: str = "mean"
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self):
        return self.name


def inputs(case, dtype):
    """Parameters and labels, and the other arguments that are arrays; in JAX."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(case.vocab, case.hidden))
    likeliest = rng.integers(case.vocab, size=case.tokens)
    hidden = rng.normal(size=(case.tokens, case.hidden)) * case.std / case.hidden**0.5
    if case.peaked:
        lengths = np.linalg.norm(weight[likeliest], axis=1, keepdims=True)
        # What the others sum up to is from vocab * exp(-9) down to next to nothing.
        hidden = weight[likeliest] / lengths**2 * np.linspace(9, 25, case.tokens)[:, None]
    given = {"hidden": hidden, "weight": weight}
    if case.bias or case.masked:
        given["bias"] = rng.normal(size=case.vocab)
    allowed = np.ones(case.vocab, bool)
    if case.masked:
        allowed[256:512] = allowed[::7] = False
        given["bias"][~allowed] = -np.inf
    given = {name: jnp.asarray(x, dtype) for name, x in given.items()}
    if case.ids:
        entries = np.flatnonzero(allowed)
        indices = entries[rng.integers(len(entries), size=(case.tokens, case.ids))]
        values = rng.random((case.tokens, case.ids))
        if case.peaked:
            indices[:, 0], values[:, 1:] = likeliest, 0
            values[:, 0] = 1
        if case.ids > 1:
            indices[:, -1] = indices[:, 0]
        with np.errstate(divide="ignore"):
            values = np.log(values) if case.kind == "log_probs" else values
        labels = TopK(jnp.asarray(indices, jnp.int32), jnp.asarray(values, case.labels), case.kind, "truncated")
    else:
        q = np.zeros((case.tokens, case.vocab))
        if case.peaked:
            q[np.arange(case.tokens), likeliest] = 1
        else:
            q[:, allowed] = np.exp(2 * rng.normal(size=(case.tokens, allowed.sum())))
            q /= q.sum(1, keepdims=True)
        labels = jnp.asarray(q, case.labels)
    more = {}
    if case.weighed:
        more["token_weight"] = jnp.linspace(0, 1.5, case.tokens)
        more["temperature"] = jnp.linspace(0.5, 1.5, case.tokens)
        more["class_weight"] = jnp.linspace(0, 2, case.vocab)
    return given, labels, more


def exact(x):
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def oracle(case, given, labels, more, upstream):
    """The loss and its gradients, and the statistics."""
    import torch  # what only lowers needs none

    import soft_labels
    from losses import LCE

    tensors = {name: torch.from_numpy(exact(x)) for name, x in (given | more).items()}
    arrays = {"bias": torch.zeros(case.vocab)} | {name: tensors.pop(name) for name in given}
    if case.ids:
        indices = torch.from_numpy(np.array(labels.indices, np.int64))
        arrays["target"] = labels._replace(indices=indices, values=torch.from_numpy(exact(labels.values)))
    else:
        arrays["target"] = torch.from_numpy(exact(labels))
    options = tensors | case.options
    right = soft_labels.oracle(LCE, arrays, np.asarray(upstream, np.float64), reduction=case.reduction, **options)
    return right, {name: x.numpy() for name, x in soft_labels.right_stats(LCE, arrays, **options).items()}


def assert_right(case, dtype, layout="vh", **how):
    """The loss, its gradients, hidden's by row too, and the statistics, all within their bounds."""
    given, labels, more = inputs(case, dtype)

    @jax.jit
    def run(given, upstream):
        def loss(given):
            weight = given["weight"] if layout == "vh" else given["weight"].T
            arguments = {**given, "weight": weight, **more, **case.options, **how}
            made, stats = linear_cross_entropy(
                **arguments, labels=labels, weight_layout=layout, reduction=case.reduction, return_stats=True
            )
            return jnp.sum(made * upstream), (made, stats)

        grads, made = jax.grad(loss, has_aux=True)(given)
        return made, grads

    upstream = jnp.linspace(-1, 2, case.tokens) if case.reduction == "none" else jnp.float32(1.5)
    (made, stats), grads = run(given, upstream)
    right, right_stats = oracle(case, given, labels, more, upstream)
    made, loss = np.asarray(made, np.float64), right.loss
    # A softmax that is nearly 1 at one entry has a loss of next to nothing, which is known to a part of itself.
    assert np.abs(made - loss).max() <= 1e-5 * np.abs(loss).max(), "loss"
    for name, x in right_stats.items():
        found = np.asarray(getattr(stats, name))
        if name in ("correct", "argmax"):
            assert np.array_equal(found, x), name
        else:
            error, size = np.linalg.norm(found - x), np.linalg.norm(x)
            assert error <= 1e-5 * max(1, size), (name, error, size)
    for name, g in grads.items():
        assert g.dtype == dtype
        e, g = getattr(right, f"grad_{name}"), exact(g)
        # float16 holds no more of a number than multiples of this.
        least = float(jnp.finfo(dtype).smallest_subnormal)
        assert np.linalg.norm(g - e) <= BOUNDS[dtype] * np.linalg.norm(e) + least * e.size**0.5, name
        if name == "hidden":
            each, size = np.linalg.norm(g - e, axis=1), np.linalg.norm(e, axis=1)
            assert (each <= 2 * BOUNDS[dtype] * size + least * case.hidden**0.5).all(), "a row of hidden's gradient"


ALL = {"bias": True, "weighed": True, "options": EVERYTHING}
CASES = (
    SoftCase("dense", 300, 192, 1088),
    SoftCase("dense, everything", 300, 192, 1096, labels="bfloat16", **ALL),
    SoftCase("dense, everything, none", 261, 256, 2112, labels="float16", reduction="none", **ALL),
    SoftCase("dense, peaked", 130, 128, 1096, peaked=True),
    SoftCase("dense, masked", 130, 128, 1088, masked=True, std=3.0, options={"z_loss": 1e-3}),
    SoftCase("ids", 300, 192, 1088, ids=8),
    SoftCase("ids, everything", 300, 192, 1096, ids=5, kind="log_probs", **ALL),
    SoftCase("ids, everything, none", 261, 256, 2112, ids=64, reduction="none", **ALL),
    SoftCase("ids, peaked", 130, 128, 1096, ids=3, peaked=True),
    SoftCase("one id, masked", 130, 128, 1088, ids=1, masked=True, std=3.0, options={"z_loss": 1e-3}),
)
