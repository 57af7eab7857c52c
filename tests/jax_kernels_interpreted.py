"""JAX's backend 'triton' with Triton's interpreter in place of XLA's call: what test_jax_kernels.py starts.

TRITON_INTERPRET=1 python jax_kernels_interpreted.py NAME ...     prints a line of JSON for each check
"""

import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch

from interpreter import main, registering
from onchip.frontend.topk import TopK
from onchip.jax import cross_entropy, grouped_matmul, jsd, linear_cross_entropy, linear_jsd, linear_log_probs, log_probs
from onchip.kernels.triton import jax_front, jax_listed
from onchip.kernels.triton.launch import Launch

CHECKS = {}
# Options whose kernels others run too, for JAX in "everything" and for PyTorch in `interpreted_losses`.
SLOW = {f"right-{x}" for x in ("each token", "recompute", "shifted", "statistics", "turned weight", "top-k teacher")}
SLOW |= {f"right-{x}" for x in ("linear_log_probs", "several ids", "forward KL", "shifted temperatures")}
SLOW |= {f"right-{x}" for x in ("turned weight of another dtype", "grouped_matmul", "labels of every entry")}
SLOW |= {f"right-{x}" for x in ("linear_cross_entropy", "log_probs", "grouped_matmul that adds up", "top-k labels")}
SLOW |= {"right-shifted sequences"} | {f"right-top-k teacher of logits, {x}" for x in ("truncated", "renormalised")}
check = registering(CHECKS)
T, H, V, HALF = 37, 64, 300, jnp.float16


def interpreted(_, results, *, input_output_aliases, legacy_backend_config, **__):
    """As `jax.ffi.ffi_call`, for what `jax_listed.told` is told; memory that is new holds NaN."""
    launch, _, places, _ = legacy_backend_config

    def run(*arrays):
        memory = [_memory(x, np.asarray(x)) for x in arrays]
        shared = {n: memory[i] for i, n in input_output_aliases.items()}
        memory += [shared.get(n, _memory(x)) for n, x in enumerate(results)]

        def own(x):
            """Such a tensor in this memory."""
            place = places.get(x.untyped_storage()._cdata, 0)
            more = memory[place][x.storage_offset() * x.itemsize :]
            return more[: len(more) // x.itemsize * x.itemsize].view(x.dtype)

        whole = jax.tree.map(lambda x: own(x) if isinstance(x, torch.Tensor) else x, launch.given)
        launch.kernel[launch.grid](**whole)
        made = memory[len(arrays) :]
        return [m.numpy().view(x.dtype).reshape(x.shape) for m, x in zip(made, results, strict=True)]

    return lambda *operands: jax.pure_callback(run, results, *operands)


def _memory(like, values=None):
    """Aligned memory for an array like this one."""
    size = like.size * like.dtype.itemsize
    new = torch.full((size + 512,), 255, dtype=torch.uint8)
    flat = new[-new.data_ptr() % 512 :][:size]
    if values is not None:
        flat.copy_(torch.from_numpy(values.copy().reshape(-1).view(np.uint8)))
    return flat


def draw(i, *shape, scale=1.0, dtype=HALF):
    # Each operation of JAX outside of jit would be compiled, and `asarray` is one.
    return jax.device_put((np.random.default_rng(i).standard_normal(shape) * scale).astype(dtype))


def target(ids=None):
    shape = (T,) if ids is None else (T, ids)
    made = np.random.default_rng(9).integers(V, size=shape).astype(np.int32)
    made[::7] = -100
    return jax.device_put(made)


def weights(*shape):
    return jax.device_put(np.float32(np.random.default_rng(8).uniform(0.1, 1, shape)))


def head(f, *, layout="vh"):
    weight = draw(1, V, H, scale=0.2)
    return f, (draw(0, T, H), weight.T if layout == "hv" else weight)


def logits(f):
    return f, (draw(0, T, V, scale=2.0),)


def experts(f):
    return f, (draw(0, T, 64), draw(1, 3, 64, 64, scale=0.2))


SIZES, ROWS = (jax.device_put(np.int32(x)) for x in ([20, 0, 11], np.arange(T) * 5 % T))


def every(found):
    parts = found if isinstance(found, tuple) else (found,)
    return sum((x * jnp.linspace(0.5, 2, T)[(...,) + (None,) * (x.ndim - 1)]).sum() for x in parts if x is not None)


def teacher():
    return draw(2, T, 32), draw(3, V, 32, scale=0.2)


def turned_teacher():
    hidden, weight = teacher()
    return hidden, weight.T.astype(jnp.float32)


TOPK = TopK(
    jax.device_put(np.int32(np.arange(8) + 20 * np.arange(T)[:, None] % (V - 8))),
    jax.device_put(np.full((T, 8), 0.1, np.float32)),
    "probs",
    "truncated",
)
TEACHERS = {
    rest: TOPK._replace(values=jax.device_put(np.log(TOPK.values)), kind="log_probs", rest=rest)
    for rest in ("tail", "truncated", "renormalised")
}
EVERYTHING = {
    "label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 20.0, "class_weight": weights(V), "token_weight": weights(T),
    "temperature": weights(T), "normalizer": jax.device_put(np.float32(3)),
}  # fmt: skip
CASES = {
    "linear_cross_entropy": head(lambda h, w, **o: linear_cross_entropy(h, w, target(), **o)),
    "turned weight": head(lambda h, w, **o: linear_cross_entropy(h, w, target(), weight_layout="hv", **o), layout="hv"),
    "each token": head(lambda h, w, **o: every(linear_cross_entropy(h, w, target(), reduction="none", **o))),
    "shifted": head(lambda h, w, **o: linear_cross_entropy(h, w, target(), shift=True, **o)),
    "shifted temperatures": head(
        lambda h, w, **o: linear_cross_entropy(h[None], w, target()[None], shift=True, temperature=weights(1, T), **o)
    ),
    "turned weight of another dtype": head(
        lambda h, w, **o: linear_jsd(
            h,
            w.astype(jnp.float32),
            *turned_teacher(),
            weight_layout="hv",
            temperature=2.0,
            temperature_squared=True,
            **o,
        ),
        layout="hv",
    ),
    "statistics": head(lambda h, w, **o: linear_cross_entropy(h, w, target(), return_stats=True, **o)[0]),
    "everything": head(lambda h, w, **o: linear_cross_entropy(h, w, target(), **EVERYTHING, **o)),
    "recompute": head(lambda h, w, **o: linear_cross_entropy(h, w, target(), strategy="recompute", **o)),
    "top-k labels": head(lambda h, w, **o: linear_cross_entropy(h, w, TOPK, **o)),
    "shifted top-k labels": head(lambda h, w, **o: linear_cross_entropy(h, w, TOPK, shift=True, **o)),
    "shifted sequences": head(
        lambda h, w, **o: linear_log_probs(
            h[:36].reshape(2, 18, H), w, target(2)[:36].reshape(2, 18, 2), shift=True, **o
        ).sum()
    ),
    "labels of every entry": head(
        lambda h, w, **o: linear_cross_entropy(h, w, jax.nn.softmax(draw(5, T, V, dtype=jnp.float32)), **o)
    ),
    "linear_log_probs": head(lambda h, w, **o: every(linear_log_probs(h, w, target(), **o))),
    "entropy": head(lambda h, w, **o: every(linear_log_probs(h, w, target(), entropy=True, lse=True, **o))),
    "several ids": head(lambda h, w, **o: linear_log_probs(h, w, target(3), **o).sum()),
    "linear_jsd": head(lambda h, w, **o: linear_jsd(h, w, *teacher(), **o)),
    "forward KL": head(lambda h, w, **o: linear_jsd(h, w, *teacher(), beta=0.0, **o)),
    "top-k teacher": head(
        lambda h, w, **o: linear_jsd(h, w, teacher_topk=TEACHERS["tail"], target=target(), hard_weight=0.3, **o)
    ),
    **{
        f"top-k teacher of logits, {rest}": logits(lambda z, x=x, **o: jsd(z, teacher_topk=x, beta=0.4, **o))
        for rest, x in TEACHERS.items()
    },
    "grouped_matmul": experts(lambda x, w, **o: every(grouped_matmul(x, w, SIZES, **o))),
    "grouped_matmul of gathered rows": experts(
        lambda x, w, **o: every(
            grouped_matmul(
                x,
                w.swapaxes(1, 2),
                SIZES,
                weight_layout="gkn",
                activation="swiglu",
                rows=ROWS,
                bias=weights(3, 64),
                **o,
            )
        )
    ),
    "grouped_matmul that adds up": experts(
        lambda x, w, **o: every(grouped_matmul(x, w, SIZES, row_scale=weights(T), scatter_rows=ROWS, num_rows=T, **o))
    ),
    "cross_entropy": logits(lambda z, **o: cross_entropy(z, target(), **o)),
    "log_probs": logits(lambda z, **o: every(log_probs(z, target(), entropy=True, **o))),
    "jsd": logits(lambda z, **o: jsd(z, draw(4, T, V), **o)),
}


@check(*CASES)
def right(name):
    function, arrays = CASES[name]
    wanted = tuple(range(len(arrays)))
    with (
        mock.patch.object(jax.ffi, "ffi_call", interpreted),
        mock.patch.object(jax_listed, "told", lambda *x: x),
        mock.patch.object(jax_listed, "resources", return_value=(0, 0)),
        mock.patch.object(Launch, "job", return_value=None),
        mock.patch.object(jax_listed, "compile_jobs", lambda jobs: jobs),
        mock.patch.object(jax_front, "refusal", return_value=None),
        mock.patch.object(jax_front, "gpu", return_value=(80, 3, 166912)),
    ):
        made = jax.jit(jax.value_and_grad(lambda *a: function(*a, backend="triton"), argnums=wanted))(*arrays)
    wide = [x.astype(jnp.float32) for x in arrays]
    expected = jax.jit(jax.value_and_grad(lambda *a: function(*a, backend="xla"), argnums=wanted))(*wide)
    errors = [distance(*both) for both in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True)]
    assert max(errors) < 3e-3, errors


def distance(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return np.linalg.norm(x - y) / np.linalg.norm(y)


if __name__ == "__main__":
    main(CHECKS, sys.argv[1:])
