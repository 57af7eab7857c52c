"""JAX's ops on arrays that are sharded by plain `jit`, compared with one device.  A script, whose process has four
devices from the start, runs all checks and reports each result.
"""

import re
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import plain_kernels
import plain_rows
from lowered import on_h100
from on_devices import adding_to, report_checks, run_checks
from onchip.groups.xla import products
from onchip.jax import (
    TopK,
    attention,
    cross_entropy,
    fp8_linear,
    grouped_matmul,
    init_moe,
    jsd,
    linear_cross_entropy,
    linear_jsd,
    linear_log_probs,
    log_probs,
    moe,
)
from onchip.masks import Causal, Window
from onchip.ops.grouped_matmul import jax_op as grouped_op
from shared_jax import assert_same

B, S, H, V = 4, 8, 16, 72
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
CHECKS, SLOW = {}, {}
check, slow = adding_to(CHECKS), adding_to(SLOW)


@cache
def arrays(batch=B, sequence=S, hidden=H, vocab=V):
    """hidden [B, S, H], weight [V, H] and labels [B, S], of which the first half of the first devices' are ignored."""
    rng = np.random.default_rng(0)
    h, w = (np.float32(rng.standard_normal(shape)) for shape in ((batch, sequence, hidden), (vocab, hidden)))
    y = rng.integers(vocab, size=(batch, sequence)).astype(np.int32)
    y[: batch // 2, : sequence // 2] = -100
    return h, w, y


def mesh_of(*names, kind=AxisType.Auto):
    return jax.make_mesh((4,) if len(names) == 1 else (2, 2), names, axis_types=(kind,) * len(names))


def placed(mesh, specs, given):
    return [jax.device_put(x, NamedSharding(mesh, P(*spec))) for x, spec in zip(given, specs, strict=True)]


def gradients(op):
    """The op's value and gradients, as a step that users jit."""
    return jax.jit(jax.value_and_grad(op, (0, 1)))


@cache
def expected(op):
    return jax.device_get(gradients(op)(*arrays()))


def to_topk(y, k=3):
    ids = (jnp.maximum(y, 0)[..., None] + jnp.arange(k).reshape(*[1] * y.ndim, k)) % V
    return TopK(ids, jnp.broadcast_to(jnp.float32([0.5, 0.3, 0.1]), ids.shape), "probs", "truncated")


def logits(h, w):
    return jnp.matmul(h, w.T, precision="highest")


def all_of(h, w, y):
    ids = jnp.stack([y, jnp.where(y < 0, y, (y + 5) % V)], -1)
    made = linear_log_probs(h, w, ids, shift=True, entropy=True, lse=True, top1=True, softcap=9.0)
    return made.log_prob.sum() + 0.3 * made.entropy.sum() + 0.1 * jnp.square(made.lse).sum()


def with_everything(h, w, y):
    loss, stats = linear_cross_entropy(
        h, w, y, w[:, 0], label_smoothing=0.1, z_loss=0.1, class_weight=jnp.linspace(0.1, 1, V),
        token_weight=jnp.square(h[..., 0]), return_stats=True,
    )  # fmt: skip
    return loss + stats.entropy.sum()


OPS = {
    "linear_cross_entropy": linear_cross_entropy,
    "linear_cross_entropy, shift": partial(linear_cross_entropy, shift=True, strategy="recompute"),
    "linear_cross_entropy, none": lambda h, w, y: jnp.square(linear_cross_entropy(h, w, y, reduction="none")).sum(),
    "linear_cross_entropy, options": with_everything,
    "linear_cross_entropy, top-k": lambda h, w, y: linear_cross_entropy(h, w, to_topk(y), shift=True),
    "linear_cross_entropy, dense": lambda h, w, y: linear_cross_entropy(
        h, w.T, jax.nn.one_hot(y, V), weight_layout="hv", reduction="sum"
    ),
    "linear_log_probs": all_of,
    "linear_jsd": lambda h, w, y: linear_jsd(h, w, 2 * h, w[::-1], labels=y, hard_weight=0.5),
    "linear_jsd, none": lambda h, w, y: jnp.square(linear_jsd(h, w, 2 * h, w[::-1], reduction="none")).sum(),
    "cross_entropy": lambda h, w, y: cross_entropy(logits(h, w), y, shift=True),
    "log_probs": lambda h, w, y: jnp.square(log_probs(logits(h, w), y)).sum(),
    "jsd": lambda h, w, y: jsd(logits(h, w), logits(2 * h, w), beta=0.3, teacher_grad=True),
}


# ------------------------------------------------------------------------------------------------ values and gradients

# How hidden and labels, and the weight, are split over a mesh of dp x tp.
LAYOUTS = {
    "replicated weight": (("dp",), ()),
    "sequence too": (("dp", "tp"), ()),
    "fsdp": ((("dp", "tp"),), (("dp", "tp"),)),
    "vocabulary": (("dp",), ("tp",)),
    "vocabulary, fsdp": (("dp",), ("tp", "dp")),
    "features": (("dp", None, "tp"), (None, "tp")),
}


def same_as_one_device(op, kind, layouts=("replicated weight", "fsdp", "vocabulary")):
    mesh = mesh_of("dp", "tp", kind=kind)
    for tokens, weight in map(LAYOUTS.get, layouts):
        with jax.set_mesh(mesh):
            made = gradients(op)(*placed(mesh, (tokens, weight, tokens[:2]), arrays()))
        assert_same(jax.device_get(made), expected(op), scale=4)
        if kind == AxisType.Explicit:
            assert [x.sharding.spec for x in made[1]] == [
                P(*x, *[None] * (n - len(x))) for x, n in ((tokens, 3), (weight, 2))
            ]


for _name, _op in OPS.items():
    SLOW[f"{_name}, auto"] = partial(same_as_one_device, _op, AxisType.Auto)
    SLOW[f"{_name}, explicit"] = partial(same_as_one_device, _op, AxisType.Explicit, ("replicated weight",))
SLOW["linear_cross_entropy, every layout"] = partial(same_as_one_device, linear_cross_entropy, AxisType.Auto, LAYOUTS)
SLOW["linear_cross_entropy, every explicit layout"] = partial(
    same_as_one_device, linear_cross_entropy, AxisType.Explicit, LAYOUTS
)
CHECKS["linear_cross_entropy, fsdp"] = partial(same_as_one_device, linear_cross_entropy, AxisType.Auto, ("fsdp",))
CHECKS["linear_log_probs, vocabulary, explicit"] = partial(
    same_as_one_device, all_of, AxisType.Explicit, ("vocabulary",)
)


@slow
def attention_of_sharded_sequences_and_heads():
    """Left to the compiler under automatic axes, a sequence too; under explicit ones that raises."""
    given = [np.float32(np.random.default_rng(i).standard_normal((4, 24, 4, 8))) for i in range(3)]

    def op(q, k, v):
        return jnp.square(attention(q, k, v, Causal() & Window(left=7))).sum()

    def step(*given):
        return jax.jit(jax.value_and_grad(op, (0, 1, 2)))(*given)

    wanted = jax.device_get(step(*given))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of("dp", "tp", kind=kind)
        with jax.set_mesh(mesh):
            assert_same(jax.device_get(step(*placed(mesh, [("dp", None, "tp")] * 3, given))), wanted, scale=4)
            if kind == AxisType.Explicit:
                with pytest.raises(ValueError, match="by its type q has its tokens sharded over 'tp'"):
                    step(*placed(mesh, [("dp", "tp")] * 3, given))
            else:
                assert_same(jax.device_get(step(*placed(mesh, [("dp", "tp")] * 3, given))), wanted, scale=4)


@slow
def fp8_linear_and_its_gradients():
    """Products of a device's rows; rows of 128 share scales in the weight's gradient."""
    rng = np.random.default_rng(0)
    x, w = (np.float32(rng.standard_normal(shape)) for shape in ((4, 128, 96), (40, 96)))

    def op(x, w):
        return jnp.square(fp8_linear(x, w)).sum()

    wanted = jax.device_get(gradients(op)(x, w))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of("dp", kind=kind)
        with jax.set_mesh(mesh):
            assert_same(jax.device_get(gradients(op)(*placed(mesh, (("dp",), ()), (x, w)))), wanted, scale=4)
            # A column's gradient has its own scales; hidden's is summed over the devices that have columns.
            made = gradients(op)(*placed(mesh, ((), ("dp",)), (x, w)))
            assert kind == AxisType.Auto or made[1][1].sharding.spec == P("dp", None)
            for a, b in zip(jax.tree.leaves(jax.device_get(made)), jax.tree.leaves(wanted), strict=True):
                assert np.linalg.norm(a - b) <= 0.06 * np.linalg.norm(b), np.linalg.norm(a - b) / np.linalg.norm(b)


# -------------------------------------------------------------------------------------------- what a device has to do


def cost(op, *given):
    """FLOPs, temporary memory and collectives of a step, as users compile it."""
    compiled = gradients(op).lower(*given).compile(OPTIMISED)
    found = re.findall(
        r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", compiled.as_text()
    )
    return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes, found


def costs_a_device_its_own_tokens(op):
    given = arrays(8, 128, 32, 512)
    alone = cost(op, *(jax.device_put(x, jax.devices()[0]) for x in given))
    mesh = mesh_of("dp")
    shared = cost(op, *placed(mesh, (("dp",), (), ("dp",)), given))
    fsdp = cost(op, *placed(mesh, (("dp",), ("dp",), ("dp",)), given))
    for flops, memory, _ in (shared, fsdp):
        assert flops < 0.27 * alone[0], (flops, alone)
        assert memory < 0.45 * alone[1], (memory, alone)
    # One sum of the weight's gradient, and one of the loss or of what it is divided by.
    assert shared[2] == ["all-reduce"] * len(shared[2])
    assert len(shared[2]) <= 2
    assert fsdp[2].count("reduce-scatter") + fsdp[2].count("all-reduce") <= 3
    assert fsdp[2].count("all-gather") <= 2


WIDE = {
    "linear_cross_entropy": linear_cross_entropy,
    "linear_cross_entropy, recompute": partial(linear_cross_entropy, strategy="recompute"),
    "linear_log_probs": lambda h, w, y: linear_log_probs(h, w, y).sum(),
    "linear_jsd": lambda h, w, y: linear_jsd(h, w, 2 * h, w),
    "cross_entropy": lambda h, w, y: cross_entropy(logits(h, w), y),
    "log_probs": lambda h, w, y: log_probs(logits(h, w), y).sum(),
    "jsd": lambda h, w, y: jsd(logits(h, w), logits(2 * h, w)),
}
for _name, _op in WIDE.items():
    SLOW[f"{_name}, cost"] = partial(costs_a_device_its_own_tokens, _op)


CHECKS["linear_cross_entropy, cost"] = SLOW.pop("linear_cross_entropy, cost")


# ------------------------------------------------------------------------------------------------------ transformations


@slow
def vmap_scan_and_checkpoint():
    h, w, y = arrays()
    mesh = mesh_of("dp")
    given = placed(mesh, (("dp",), (), ("dp",)), (h, w, y))

    def by_vmap(h, w, y):
        return jax.vmap(linear_cross_entropy, (0, None, 0))(h, w, y).sum()

    def by_scan(h, w, y):
        def step(total, scale):
            return total + jax.checkpoint(linear_cross_entropy)(scale * h, w, y), None

        return jax.lax.scan(step, 0.0, jnp.float32([1, 2]))[0]

    for op in (by_vmap, by_scan):
        assert_same(gradients(op)(*given), expected(op))


@check
def a_model_with_the_batch_sharded():
    """Layers before the head, a tied weight, and a step of SGD; the same without jit."""
    _, w, y = arrays()
    mesh = mesh_of("dp")

    def loss(w, y):
        ids = jnp.maximum(y, 0)
        return linear_cross_entropy(jnp.tanh(w[ids]), w, y, shift=True)

    def step(w, y):
        return w - 0.1 * jax.grad(loss)(w, y)

    wanted = jax.device_get(jax.jit(step)(w, y))
    given = placed(mesh, ((), ("dp",)), (w, y))
    assert_same(jax.jit(step)(*given), wanted)
    assert_same(step(*given), wanted)


@slow
def a_frozen_weight_and_no_gradients():
    mesh = mesh_of("dp")
    given = placed(mesh, (("dp",), ("dp",), ("dp",)), arrays())
    h, w, y = arrays()
    assert_same(jax.jit(linear_cross_entropy)(*given), jax.jit(linear_cross_entropy)(h, w, y))
    assert_same(jax.jit(jax.grad(linear_cross_entropy))(*given), jax.jit(jax.grad(linear_cross_entropy))(h, w, y))


def inside_of_shard_map_where_all_tokens_count(topk):
    """Without targets that are ids, the number of tokens is the same on all devices, but what is computed isn't."""
    h, w, y = map(jnp.asarray, arrays(batch=4, sequence=2))
    q, few, mesh = jax.nn.softmax(h @ w.T), to_topk(y), mesh_of("dp")
    known = TopK(few.indices, jnp.log(few.values), "log_probs", "tail")
    labels, teacher = (few, known) if topk else (q, 2 * h)
    of_teacher = (lambda x: {"teacher_topk": x}) if topk else lambda x: {"teacher_hidden": x, "teacher_weight": 2 * w}
    for op, more in (
        (lambda h, w, labels: linear_cross_entropy(h, w, labels, reduction="none"), labels),
        (lambda h, w, x: linear_jsd(h, w, **of_teacher(x), reduction="none"), teacher),
    ):
        mapped = jax.shard_map(op, mesh=mesh, in_specs=(P("dp"), P(), P("dp")), out_specs=P("dp"))
        assert_same(*(gradients(lambda *x, f=f: f(*x).sum())(h, w, more) for f in (mapped, op)))


CHECKS["where all tokens count, in shard_map"] = partial(inside_of_shard_map_where_all_tokens_count, topk=False)
SLOW["where all tokens count, of a top-k"] = partial(inside_of_shard_map_where_all_tokens_count, topk=True)


def routed(h, w, y):
    """Each token's logits over the entries that its label chooses, by groups that differ from device to device."""
    group = y % 4
    order = jnp.argsort(group)
    where = {"rows": order, "scatter_rows": order, "num_rows": len(h), "row_scale": jnp.full(len(h), 0.5)}
    return jnp.square(grouped_matmul(h, w.reshape(4, -1, 16), jnp.bincount(group, length=4), **where)).sum()


SMALL = {"reduction": "sum", "scratch_bytes": 450_000}
IN_SHARD_MAP = {
    "grouped_matmul": routed,
    "linear_cross_entropy, stash": partial(linear_cross_entropy, reduction="sum", strategy="stash"),
    "linear_cross_entropy, recompute": partial(linear_cross_entropy, strategy="recompute", **SMALL),
    "linear_log_probs": lambda h, w, y: linear_log_probs(h, w, y, scratch_bytes=450_000).sum(),
    "linear_jsd": lambda h, w, y: linear_jsd(h, w, h, w[::-1], labels=y, hard_weight=0.5, reduction="sum"),
    "cross_entropy": lambda h, w, y: cross_entropy(logits(h, w), y, reduction="sum"),
}


def inside_of_shard_map(op):
    """Devices have their own numbers of chunks, since others of their tokens count."""
    rng = np.random.default_rng(0)
    h, w = np.float32(rng.standard_normal((128, 16))), np.float32(rng.standard_normal((1100, 16)))
    y = rng.integers(1100, size=128).astype(np.int32)
    y[:50] = -100
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def step(h, w, y):
        loss, grads = jax.value_and_grad(op, (0, 1))(h, w, y)
        return jax.lax.psum(loss, "dp"), grads

    # JAX itself sums the gradient of weight, which all devices have, over them.
    specs = {"in_specs": (P("dp"), P(), P("dp")), "out_specs": (P(), (P("dp"), P()))}
    assert_same(jax.jit(jax.shard_map(step, mesh=mesh, **specs))(h, w, y), gradients(op)(h, w, y))


for _name, _op in IN_SHARD_MAP.items():
    _to = SLOW if _name in ("linear_cross_entropy, stash", "linear_log_probs", "linear_jsd") else CHECKS
    _to[f"{_name}, in shard_map"] = partial(inside_of_shard_map, _op)


@check
def no_dtype_is_promoted_by_jax():
    h, w, y = arrays()
    given = placed(mesh_of("data"), (("data",), (), ("data",)), (h.astype(jnp.bfloat16), w.astype(jnp.bfloat16), y))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = gradients(linear_cross_entropy)(*given)
    jax.tree.map(np.testing.assert_array_equal, found, gradients(linear_cross_entropy)(*given))


@slow
def gradients_of_16_bits():
    """An upstream gradient scales what forward made; of float16 the gradients are made in backward, where they don't
    vanish."""
    mesh = mesh_of("dp")
    for dtype, scale in ((jnp.bfloat16, 3.0), (jnp.float16, 2.0**16)):
        h, w, y = arrays()
        given = jnp.asarray(h, dtype), jnp.asarray(w, dtype) * 0.1, y

        def op(h, w, y, scale=scale):
            return linear_cross_entropy(h, w, y, normalizer=2.0**20) * scale

        wanted, made = gradients(op)(*given), gradients(op)(*placed(mesh, (("dp",), (), ("dp",)), given))
        for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
            x, y = np.float32(x), np.float32(y)
            assert np.linalg.norm(x - y) <= 4 * float(jnp.finfo(dtype).eps) * np.linalg.norm(y)


@slow
def kernels():
    """Stand-ins for those of Mosaic: what a device keeps, and the plan of its tokens, are its own."""
    rng = np.random.default_rng(0)
    h, w = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((4, 96, 128), (1088, 128)))
    y = rng.integers(1088, size=(4, 96)).astype(np.int32)
    y[0, :90] = -100
    for options in ({}, {"reduction": "none"}):

        def op(h, w, y, options=options, **which):
            return linear_cross_entropy(h, w / 4, y, z_loss=1e-3, **options, **which).sum()

        wanted = jax.device_get(gradients(op)(h.astype(jnp.float32), w.astype(jnp.float32), y))
        with pytest.MonkeyPatch.context() as monkeypatch:
            plain_kernels.stand_in(monkeypatch)
            given = placed(mesh_of("dp"), (("dp",), (), ("dp",)), (h, w, y))
            made = gradients(partial(op, backend="mosaic_gpu"))(*given)
        for x, expected in zip(jax.tree.leaves(jax.device_get(made)), jax.tree.leaves(wanted), strict=True):
            assert np.linalg.norm(np.float32(x) - expected) <= 1e-2 * np.linalg.norm(expected)


@slow
def kernels_of_rows():
    """The same for logits that exist: each device's kernels get its own rows, or its part of them."""
    rng = np.random.default_rng(0)
    z = np.float32(rng.standard_normal((8, 12, 136)) * 2)
    y = rng.integers(136, size=(8, 12)).astype(np.int32)
    y[0, :10] = -100

    def losses(z, scale, y, **which):
        return cross_entropy(z * scale, y, z_loss=1e-3, label_smoothing=0.1, **which)

    def of_ids(z, scale, y, **which):
        made = log_probs(z * scale, jnp.stack([y, jnp.where(y < 0, y, 7)], -1), entropy=True, **which)
        return made.log_prob.sum() + 0.3 * made.entropy.sum()

    def by_token(z, scale, y, **which):
        return jnp.square(cross_entropy(z * scale, y, reduction="none", **which)).sum()

    def soft(z, scale, y, **which):
        return cross_entropy(z * scale, jnp.abs(z), **which)

    scale, split = np.float32(0.7), (("dp", "tp"), None, None)
    for op in (losses, of_ids, by_token, soft):
        wanted = jax.device_get(gradients(partial(op, backend="xla"))(z, scale, y))
        with pytest.MonkeyPatch.context() as monkeypatch:
            plain_rows.stand_in(monkeypatch)
            run = gradients(partial(op, backend="mosaic_gpu"))
            for kind in (AxisType.Auto, AxisType.Explicit):
                mesh = mesh_of("dp", "tp", kind=kind)
                with jax.set_mesh(mesh):
                    given = placed(mesh, (split, (), split[:2]), (z, scale, y))
                    compiled = run.lower(*given).compile()
                    assert_same(compiled(*given), wanted, scale=4)
                assert "f32[24,136]" in compiled.as_text()
                assert not re.search(r"f32\[(96|8,12|48),136\]", compiled.as_text())
            mesh = mesh_of("dp", "tp")
            given = placed(mesh, (("dp", None, "tp"), (), ("dp",)), (z, scale, y))
            with pytest.raises(Exception, match="it needs rows of at least 128 logits; got V=68"):
                run(*given)
            assert_same(gradients(op)(*given), wanted, scale=4)  # 'auto' takes plain JAX
            longer = np.concatenate([z, z[..., ::-1] / 2], -1)
            given = placed(mesh, (("dp", None, "tp"), (), ("dp",)), (longer, scale, y))
            assert_same(run(*given), gradients(partial(op, backend="xla"))(longer, scale, y), scale=4)
        plain_rows.forget()


@slow
def rows_of_groups():
    """Rows that are gathered and added up, of devices in the order of the rows; and a mixture of experts."""
    rng = np.random.default_rng(0)
    x, w = (np.float32(rng.standard_normal(shape)) for shape in ((64, 16), (4, 24, 16)))
    rows = rng.integers(64, size=128).astype(np.int32)
    scale = np.float32(rng.random(128))
    params = init_moe(jax.random.key(0), 16, 8, 4, bias=True)

    def plain(x, w):
        return jnp.square(grouped_matmul(x, w, jnp.array([9, 0, 40, 11]), bias=w[:, :, 0], activation="swiglu")).sum()

    def by_rows(x, w):
        sizes = jnp.array([20, 70, 0, 30])
        inner = grouped_matmul(x, w, sizes, rows=rows, row_scale=jnp.square(scale))
        back = {"scatter_rows": rows, "num_rows": 64, "weight_layout": "gkn"}
        return jnp.square(x + grouped_matmul(inner, w, sizes, **back)).sum()

    def of_experts(x, w):
        y, stats = moe(params._replace(down=params.down + w.sum()), x.reshape(8, 8, 16), top_k=2)
        return jnp.square(y).sum() + stats.aux_loss

    for op in (plain, by_rows, of_experts):
        wanted = jax.device_get(gradients(op)(x, w))
        for kind in (AxisType.Auto, AxisType.Explicit):
            mesh = mesh_of("dp", "tp", kind=kind)
            with jax.set_mesh(mesh):
                made = jax.device_get(gradients(op)(*placed(mesh, (("dp",), ()), (x, w))))
            assert_same(made, wanted, scale=4)


@check
def kernels_of_groups():
    """A kernel keeps gate and up as [2, T, F], whose second dimension is the tokens'."""
    rng = np.random.default_rng(0)
    x, w = (np.float32(rng.standard_normal(shape)) for shape in ((64, 16), (4, 24, 16)))
    sizes = jnp.array([9, 0, 30, 21])

    def op(x, w):
        return jnp.square(grouped_matmul(x, w, sizes, activation="swiglu", row_scale=x[:, 0])).sum()

    def layer(*given):
        out, y = products.layer(*given)
        return out, None if y is None else jnp.stack(jnp.split(y, 2, axis=1))

    wanted = jax.device_get(gradients(op)(x, w))
    engine = SimpleNamespace(layer=layer, sum_rows=products.sum_rows, weight_product=products.weight_product)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(grouped_op, "_engine", lambda _: engine)
        made = jax.device_get(gradients(op)(*placed(mesh_of("dp", "tp"), (("dp",), ()), (x, w))))
    assert_same(made, wanted, scale=4)


@check
def rules_on_gpus():
    """The compiler of several GPUs is told which dimensions of what the kernels keep are split alike."""
    mesh, bf16 = mesh_of("dp", "tp"), jnp.bfloat16
    tokens, whole = NamedSharding(mesh, P("dp")), NamedSharding(mesh, P())

    def shape(sizes, dtype, sharding):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    params = jax.eval_shape(lambda: init_moe(jax.random.key(0), 128, 128, 4, dtype=bf16))
    params = jax.tree.map(lambda x: shape(x.shape, x.dtype, whole), params)
    h, w, y = shape((4, 128, 128), bf16, tokens), shape((1024, 128), bf16, whole), shape((4, 128), jnp.int32, tokens)
    q, k = (shape((4, 128, heads, 64), bf16, tokens) for heads in (4, 2))
    calls = [(op, (h, w, y)) for name, op in OPS.items() if name.split(", ")[-1] not in ("options", "dense")] + [
        (lambda x, w: fp8_linear(x, w).sum(), (h, w)),
        (lambda x, p: moe(p, x, top_k=2)[0].sum(), (h, params)),
        (lambda q, k: attention(q, k, k, Causal()).astype(jnp.float32).sum(), (q, k)),
    ]
    for op, given in calls:
        with on_h100(), jax.set_mesh(mesh):
            lowered = gradients(op).trace(*given).lower(lowering_platforms=("cuda",))
        assert "sdy.sharding_rule" in lowered.as_text() or "CustomSPMDPartitioning" in lowered.as_text()


@check
def no_empty_constants_for_gpus():
    """Inside of a `jax.shard_map`, one ends the process in the compiler of JAX 0.11.2."""
    mesh = mesh_of("dp", "tp", kind=AxisType.Explicit)
    shapes = ((4, 128, 128), jnp.bfloat16), ((1024, 128), jnp.bfloat16), ((4, 128), jnp.int32)
    tokens, weight = LAYOUTS["vocabulary"]
    given = [
        jax.ShapeDtypeStruct(*x, sharding=NamedSharding(mesh, P(*spec)))
        for x, spec in zip(shapes, (tokens, weight, tokens), strict=True)
    ]
    with on_h100(), jax.set_mesh(mesh):
        text = gradients(linear_cross_entropy).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert "dense<>" not in text


@check
def budgets_of_devices():
    """A budget may do for a device's tokens and not for all of them, which one device refuses."""
    given, mesh, layout = arrays(8, 128, 32, 512), mesh_of("dp"), (("dp",), (), ("dp",))
    op = partial(linear_cross_entropy, strategy="recompute")
    small = gradients(partial(op, scratch_bytes=400_000))
    assert_same(small(*placed(mesh, layout, given)), gradients(op)(*given))
    mapped = jax.vmap(small, (0, None, None))
    for step in (small, lambda h, w, y: mapped(h[None], w, y)):
        with pytest.raises(ValueError, match="scratch_bytes=400000 is too small for T=1024"):
            step(*given)

    def attend(q, k):
        return attention(q, k, k, Causal(), scratch_bytes="100 KiB").astype(jnp.float32).sum()

    for sharding in (NamedSharding(mesh, P("dp")), None):
        q, k = (jax.ShapeDtypeStruct((4, 128, n, 128), jnp.bfloat16, sharding=sharding) for n in (4, 2))
        refused = pytest.raises(ValueError, match="scratch_bytes=102400 is too small")
        with on_h100(), nullcontext() if sharding else refused:
            text = gradients(attend).trace(q, k).lower(lowering_platforms=("cuda",)).as_text()
    assert "CustomSPMDPartitioning" in text


@slow
def kernels_for_a_whole_vocabulary_alone():
    """Half of it is no multiple of 8: plain JAX computes that, and has the same results as the kernels would."""
    given = [jnp.asarray(x, jnp.bfloat16) / 4 for x in arrays(4, 8, 128, 1032)[:2]]
    mesh, rng = mesh_of("dp", "tp"), np.random.default_rng(0)

    def op(h, w, ids):
        made = linear_log_probs(h, w, ids, entropy=True)
        return made.log_prob.sum() + made.entropy.sum()

    given.append(rng.integers(1032, size=(4, 8)))
    wanted = jax.device_get(gradients(op)(*given))
    with on_h100():
        made = jax.device_get(gradients(op)(*placed(mesh, LAYOUTS["vocabulary"] + (("dp",),), given)))
    for x, expected in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(np.float32(x - expected)) <= 1e-2 * np.linalg.norm(np.float32(expected))


@check
def what_cannot_be_split():
    """A strategy that needs a whole vocabulary, where that is split: the error says what to pass."""
    mesh = mesh_of("dp", "tp")
    op = gradients(partial(linear_cross_entropy, strategy="stash"))
    with pytest.raises(Exception, match="strategy='stash' needs the softmax of a whole vocabulary"):
        op(*placed(mesh, (("dp",), ("tp",), ("dp",)), arrays()))
    # Second derivatives and forward mode as ever.
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        jax.grad(lambda h: jax.grad(lambda h: linear_cross_entropy(h, *arrays()[1:]))(h).sum())(
            jnp.asarray(arrays()[0])
        )


@pytest.mark.parametrize("which", ["checks", pytest.param("slow", marks=pytest.mark.slow)])
def test_data_parallel(which):
    run_checks(__file__, which, {"checks": CHECKS, "slow": SLOW}[which])


if __name__ == "__main__":
    report_checks(CHECKS, SLOW)
