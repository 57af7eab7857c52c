"""JAX's losses of a vocabulary that is split over devices, compared with the whole: what all checks share.

Of what a loss is given, names say where the vocabulary lies; the rest is by token.
"""

from contextlib import contextmanager, nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import onchip.jax
from onchip.jax import TopK
from shared_jax import assert_same

B, S = 4, 6
NAMES = "data", "model"
EVERY = dict.fromkeys(("entropy", "lse", "top1", "mean_logits", "log_sum_sq_probs"), True)


def mesh_of(kind=AxisType.Auto, devices=(2, 2)):
    return jax.make_mesh(devices, NAMES, axis_types=(kind, kind))


def draw(i, *shape, scale=1.0):
    # Each operation of JAX outside of jit would be compiled, and `asarray` is one.
    return jax.device_put(np.float32(np.random.default_rng(i).standard_normal(shape) * scale))


def ids(vocab, *more, seed=1, tokens=(B, S)):
    """Of which many are ignored: all of some devices' tokens."""
    made = np.random.default_rng(seed).integers(vocab, size=(*tokens, *more)).astype(np.int32)
    made[0, :-1] = made[2, ..., 0 if more else slice(None)] = -100
    return jax.device_put(made)


def topk(vocab, rest="truncated", kind="probs", *, k=6, tokens=(B, S)):
    """Distinct ids, of which all devices have some, and those of a token are one device's; a label is among them."""
    order = np.random.default_rng(7).random((*tokens, vocab))
    order[0, np.arange(tokens[1]), np.asarray(ids(vocab, tokens=tokens))[0].clip(0)] = order[1, 0, :k] = -1
    found = np.argsort(order, -1)[..., :k].astype(np.int32)
    values = np.random.default_rng(8).random((*tokens, k)).astype(np.float32) / k
    return TopK(*jax.device_put((found, values if kind == "probs" else np.log(values))), kind, rest)


def per_token(*names, tokens=(B, S)):
    """Weights and temperatures."""
    numbers = np.linspace(0.5, 2, tokens[0] * tokens[1], dtype=np.float32).reshape(tokens)
    return {name: jnp.asarray(numbers if name == "temperature" else numbers[::-1]) for name in names}


def axis_of(name, x):
    """The dimension of the vocabulary, if there is one."""
    dense = name == "target" and not isinstance(x, TopK) and jnp.issubdtype(x.dtype, jnp.floating)
    if dense or name.endswith("logits"):
        return x.ndim - 1
    return 0 if name.endswith("bias") or (name.endswith("weight") and name != "token_weight") else None


def padded(x, size, axis=0):
    """With padding that would show, if it counted."""
    width = [(0, size - x.shape[axis]) if i == axis % x.ndim else (0, 0) for i in range(x.ndim)]
    xp = jnp if isinstance(x, jax.core.Tracer) else np
    return jnp.asarray(xp.pad(x, width, constant_values=9.0))


def total(made):
    """Something that all of a result's derivatives are in; those without one come out as they are."""
    leaves = [x for x in jax.tree.leaves(made) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((x * jnp.linspace(1, 2, x.size).reshape(x.shape)).sum() for x in leaves), made


@contextmanager
def kernels_of(module, plan=None):
    """With a module's stand-ins for kernels, and perhaps with a plan: what plans, and what it is to say."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        module.stand_in(monkeypatch)
        if plan is not None:
            monkeypatch.setattr(plan[0], "plan", lambda *_: plan[1])
        yield
    module.forget()


def split(op, given, vocab, size, *, door, mesh, token_axes="data", **options):
    """The op of the parts as a function of arrays by name: on a mesh, or along an axis of a `shard_map` around it."""
    words = {name: x[2:] for name, x in given.items() if isinstance(x, TopK)}
    turned = options.get("weight_layout") == "hv"
    options |= {"vocab" if op.__name__.endswith("jsd") else "vocab_size": vocab}
    axes = {name: axis_of(name, x) for name, x in given.items()}

    def placed(arrays):
        """Parts of all devices, side by side."""
        made = {n: x if axes[n] is None else padded(x, size, axes[n]) for n, x in arrays.items()}
        layer = [n for n in made if n.endswith("weight") and axes[n] == 0 and turned]
        return made | {n: made[n].T for n in layer}

    def call(function, arrays, **how):
        return function(**{n: TopK(*x, *words[n]) if n in words else x for n, x in arrays.items()}, **options, **how)

    def on_mesh(arrays):
        function = getattr(onchip.jax, f"sharded_{op.__name__}")
        return call(function, placed(arrays), vocab_axis="model", token_axes=token_axes, mesh=mesh)

    def along_axis(arrays):
        sums, arrays = options.get("reduction") == "sum", placed(arrays)

        def on_device(arrays):
            made = call(op, arrays, axis_name="model")
            return jax.lax.psum(made, "data") if sums else made

        def spec(name):
            axis = axes[name]
            if axis is None:
                return P("data")
            if axis == 0:
                return P(None, "model") if turned and name.endswith("weight") else P("model")
            return P("data", None, "model")

        specs = {name: spec(name) for name in arrays}
        out = P() if sums else P("data")
        return jax.shard_map(on_device, mesh=mesh, in_specs=(specs,), out_specs=out)(arrays)

    return {"mesh": on_mesh, "axis": along_axis}[door]


CONSTANT = ("target", "ids", "token_weight", "temperature", "teacher_topk")


def compare(
    op, given, vocab, *doors, size, bound=None, scale=1.0, dtype=None, devices=(2, 2), kernels=None, plan=None,
    token_axes="data", **options,
):  # fmt: skip
    """Results and gradients of the parts are those of the whole; all but labels and numbers of tokens has gradients.

    size: of the vocabulary with padding.  bound: of relative errors, where `kernels` round to 16 bits.
    """
    leaves = {name: x for name, x in given.items() if name not in CONSTANT}
    leaves = {name: x if dtype is None else x.astype(dtype) for name, x in leaves.items()}
    others = {name: x[:2] if isinstance(x, TopK) else x for name, x in given.items() if name in CONSTANT}
    words = {name: x[2:] for name, x in given.items() if isinstance(x, TopK)}

    def whole(arrays):
        arrays = {n: TopK(*x, *words[n]) if n in words else x for n, x in arrays.items()}
        return op(**arrays, **{n: x for n, x in options.items() if n not in ("weight_layout", "backend")})

    def step(function):
        return jax.jit(jax.value_and_grad(lambda leaves: total(function(leaves | others)), has_aux=True))

    expected = step(whole)({name: x.astype(jnp.float32) for name, x in leaves.items()})
    for door in doors:
        with nullcontext() if kernels is None else kernels_of(kernels, plan):
            how = {"backend": "mosaic_gpu"} if kernels is not None else {}
            mesh = mesh_of(devices=devices)
            run = split(op, given, vocab, size, door=door, mesh=mesh, token_axes=token_axes, **options, **how)
            found = step(run)(leaves)
        if bound is None:
            assert_same(found, expected, scale)
            continue
        for x, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            if jnp.issubdtype(e.dtype, jnp.floating):
                assert jnp.linalg.norm(x.astype(jnp.float32) - e) <= bound * jnp.linalg.norm(e), door
            else:
                assert (x == e).all(), door
