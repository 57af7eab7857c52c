"""JAX's losses of a head whose vocabulary is split over devices, compared with the whole.  A script, whose process has
four devices from the start, runs all checks and reports each result.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import plain_kernels
from on_devices import adding_to, report_checks, run_checks
from onchip.jax import (
    TopK,
    linear_cross_entropy,
    linear_jsd,
    linear_log_probs,
    sharded_linear_cross_entropy,
    sharded_linear_jsd,
    sharded_linear_log_probs,
)
from onchip.ops.linear_cross_entropy import jax_op
from onchip.vocab.mosaic import op as mosaic_op
from onchip.vocab.mosaic.memory import MosaicPlan
from shared_jax import assert_same

B, S, H, V, PADDED = 4, 6, 16, 69, 72
NAMES = "data", "model"
CHECKS, SLOW = {}, {}
check, slow = adding_to(CHECKS), adding_to(SLOW)
EVERY = dict.fromkeys(("entropy", "lse", "top1", "mean_logits", "log_sum_sq_probs"), True)


# -------------------------------------------------------------------------------------------------- arrays and meshes


@cache
def arrays():
    """hidden, weight and bias; of tokens a label, a weight, a temperature and three ids; weights of classes."""
    # Made by NumPy: each operation of JAX outside of jit would be compiled.
    rng = np.random.default_rng(0)
    given = tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((B, S, H), (V, H), V))
    y, ids = rng.integers(V, size=(B, S)).astype(np.int32), rng.integers(V, size=(B, S, 3)).astype(np.int32)
    y[0, :5] = y[2] = ids[0, :5] = ids[1, 1, 1] = -100
    temperature = np.linspace(0.5, 2, B * S, dtype=np.float32).reshape(B, S)
    tokens = {"token_weight": jnp.asarray(rng.random((B, S)), jnp.float32), "temperature": jnp.asarray(temperature)}
    return given, jnp.asarray(y), tokens, jnp.asarray(ids), jnp.asarray(rng.random(V), jnp.float32)


@cache
def teacher():
    """hidden and weight of another size."""
    rng = np.random.default_rng(1)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((B, S, 8), (V, 8)))


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((2, 2), NAMES, axis_types=(kind, kind))


def padded(x, axis=0):
    """With padding that would show, if it counted."""
    width = [(0, PADDED - V) if i == axis % x.ndim else (0, 0) for i in range(x.ndim)]
    xp = jnp if isinstance(x, jax.core.Tracer) else np
    return jnp.asarray(xp.pad(x, width, constant_values=9.0))


def total(made):
    """Something that all of a result's derivatives are in; those without one come out as they are."""
    leaves = [x for x in jax.tree.leaves(made) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((x * jnp.linspace(1, 2, x.size).reshape(x.shape)).sum() for x in leaves), made


def everything(function):
    return jax.value_and_grad(function, (0, 1, 2), has_aux=True)


def same_as_whole(whole, split, *, scale=1.0):
    """Results and gradients of functions of hidden, weight and bias; `split` pads the last two itself."""
    given = arrays()[0]
    expected = jax.jit(everything(lambda *x: total(whole(*x))))(*given)
    assert_same(jax.jit(everything(lambda *x: total(split(*x))))(*given), expected, scale)


def along_axis(op, *, tokens=(), **options):
    """The op inside of a `shard_map`, by its argument axis_name; what is by token is given in `tokens`, a dict."""

    def split(h, w, b):
        def on_device(h, w, b, of_tokens):
            made = op(h, w, bias=b, axis_name="model", vocab_size=V, **of_tokens, **options)
            return jax.lax.psum(made, "data") if options.get("reduction") == "sum" else made

        spec = P("data")
        out = P() if options.get("reduction") == "sum" else spec
        run = jax.shard_map(
            on_device, mesh=mesh_of(), in_specs=(spec, P("model"), P("model"), spec), out_specs=out
        )  # fmt: skip
        return run(h, padded(w), padded(b), dict(tokens))

    return split


# ------------------------------------------------------------------------------------------------- linear_cross_entropy


@check
def axis_name_with_all_numbers():
    _, y, tokens, _, _ = arrays()
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "logit_scale": 0.7, "reduction": "sum"}
    whole = lambda h, w, b: linear_cross_entropy(h, w, y, b, **tokens, **options)  # noqa: E731
    same_as_whole(whole, along_axis(linear_cross_entropy, tokens={"target": y, **tokens}, **options))


@check
def a_mesh_with_statistics_and_class_weights():
    _, y, tokens, _, classes = arrays()
    options = {"class_weight": classes, "label_smoothing": 0.2, "return_stats": True, "shift": True, **tokens}
    whole = lambda h, w, b: linear_cross_entropy(h, w, y, b, **options)  # noqa: E731
    split = partial(sharded_linear_cross_entropy, vocab_axis="model", token_axes="data", mesh=mesh_of(), vocab_size=V)
    same_as_whole(
        whole,
        lambda h, w, b: split(h, padded(w).T, y, padded(b), weight_layout="hv", scratch_bytes=100_000, **options),
    )


@check
def the_ambient_mesh_of_explicit_axes():
    """Under scan with `jax.checkpoint`, each micro-batch with the count of all; gradients have their arrays'
    sharding."""
    (h, w, b), y, _, _, _ = arrays()
    expected = jax.jit(jax.grad(lambda *x: linear_cross_entropy(*x[:2], y, x[2]), (0, 1, 2)))(h, w, b)
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        # Micro-batches of positions.
        hs, ys = (jax.device_put(np.stack(np.split(np.asarray(x), 2, 1)), P(None, "data")) for x in (h, y))
        ws, bs = (jax.device_put(padded(x), P("model")) for x in (w, b))
        count = (np.asarray(y) != -100).sum()

        @jax.checkpoint
        def loss(h, w, b, y):
            return sharded_linear_cross_entropy(
                h, w, y, b, vocab_axis="model", token_axes=("data",), vocab_size=V, normalizer=count
            )

        @jax.jit
        def accumulated(h, w, b, y):
            def add(sums, part):
                by_h, *grads = jax.grad(loss, (0, 1, 2))(part[0], w, b, part[1])
                return jax.tree.map(jnp.add, sums, tuple(grads)), by_h

            return jax.lax.scan(add, (jnp.zeros_like(w), jnp.zeros_like(b)), (h, y))

        grads, by_h = accumulated(hs, ws, bs, ys)
        assert [jax.typeof(x).sharding.spec for x in grads] == [P("model", None), P("model")]
        found = np.concatenate(jax.device_get(by_h), 1), *(x[:V] for x in jax.device_get(grads))
    assert_same(found, expected)


@slow
def without_check_vma():
    """The loss is right; a gradient, whose scale can't be known, raises."""
    (h, w, _), y, _, _, _ = arrays()
    run = jax.jit(
        jax.shard_map(
            lambda h, w: linear_cross_entropy(h, w, y, axis_name="model", vocab_size=V),
            mesh=mesh_of(),
            in_specs=(P(), P("model")),
            out_specs=P(),
            check_vma=False,
        )
    )
    assert_same(run(h, padded(w)), linear_cross_entropy(h, w, y))
    with pytest.raises(ValueError, match=r"linear_cross_entropy: inside of jax\.shard_map\(\.\.\., check_vma=False\)"):
        jax.grad(run)(h, padded(w))


@check
def rows_that_are_nearly_certain():
    """Losses of 1e-6, logits about 1e4, entries and a whole device of -inf: each with the digits of the whole."""
    (h, w, b), y, _, _, _ = arrays()
    h, b, y = (np.array(x) for x in (h, b, y))
    h[3], y[3, :3] = 0, [38, 40, 68]
    b[:36], b[38] = -np.inf, 10018
    b[[40, 68]] += 10000
    given = h, w, b
    whole = lambda h, w, b: linear_cross_entropy(h, w, y, b, reduction="none")  # noqa: E731
    split = partial(sharded_linear_cross_entropy, vocab_axis="model", mesh=mesh_of(), vocab_size=V, reduction="none")
    expected = jax.jit(whole)(*given)
    found = jax.jit(lambda h, w, b: split(h, padded(w), y, padded(b)))(*given)
    assert 0 < expected[3, 0] < 1e-6
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def as_kernels_compute_it(plan, layout="vh", vocab=2160, **options):
    """With a plan of `mosaic_op`, against plain JAX in float32."""
    rng = np.random.default_rng(0)
    h, w = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((4, 96, 128), (2176, 128)))
    w = w / 4
    y = jnp.asarray(rng.integers(vocab, size=(4, 96)), jnp.int32).at[0, :90].set(-100)

    def whole(h, w):
        return linear_cross_entropy(h, w[:vocab], y, **options)

    def split(h, w):
        on_mesh = {"vocab_axis": "model", "token_axes": "data", "mesh": mesh_of(), "vocab_size": vocab}
        w = w.T if layout == "hv" else w
        return sharded_linear_cross_entropy(h, w, y, backend="mosaic_gpu", weight_layout=layout, **on_mesh, **options)

    with pytest.MonkeyPatch.context() as monkeypatch:
        plain_kernels.stand_in(monkeypatch)
        if plan is not None:
            monkeypatch.setattr(mosaic_op, "plan", lambda *_: plan)
        found = jax.jit(jax.value_and_grad(split, (0, 1)))(h, w)
    wide = [x.astype(jnp.float32) for x in (h, w)]
    expected = jax.jit(jax.value_and_grad(whole, (0, 1)))(*wide)
    for x, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.linalg.norm(x.astype(jnp.float32) - e) <= 8e-3 * jnp.linalg.norm(e)


@check
def kernels_that_keep_exponentials():
    as_kernels_compute_it(MosaicPlan("stash", 192, kept_in_gradient=128, chunk=256, kept_in_scratch=128))


@slow
def kernels_by_their_own_plans():
    for layout, vocab, options in (
        ("vh", 2176, {"softcap": 5.0, "z_loss": 1e-3}),
        ("hv", 2176, {"label_smoothing": 0.1}),
        ("vh", 2176, {"label_smoothing": 0.1, "class_weight": jnp.linspace(0, 2, 2176)}),
        ("hv", 2100, {"strategy": "recompute"}),
    ):
        as_kernels_compute_it(None, layout, vocab, **options)


@slow
def kernels_lower():
    """The real ones, for CUDA, between one all-gather and the sums over devices."""
    call = partial(sharded_linear_cross_entropy, vocab_axis="model", mesh=mesh_of(), backend="mosaic_gpu")
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 512), (4096, 512))]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(jax_op, "platform", lambda: "gpu")
        monkeypatch.setattr(mosaic_op, "refusal", lambda *_: None)
        step = jax.jit(jax.value_and_grad(lambda h, w, y: call(h, w, y), (0, 1)))
        traced = step.trace(*given, jax.ShapeDtypeStruct((1024,), jnp.int32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert [text.count(f'"stablehlo.{x}"') for x in ("all_gather", "all_reduce")] == [1, 1]
    assert text.count("custom_call @mosaic_gpu") > 4


@slow
def statistics_by_kernels():
    """Without gradients, and in several parts: still one exchange."""
    rng = np.random.default_rng(0)
    h, w = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((300, 128), (2176, 128)))
    y = jnp.asarray(rng.integers(2170, size=300), jnp.int32).at[5].set(-100)
    options = {"reduction": "none", "return_stats": True}
    call = partial(sharded_linear_cross_entropy, vocab_axis="model", mesh=mesh_of(), vocab_size=2170, **options)
    with pytest.MonkeyPatch.context() as monkeypatch:
        plain_kernels.stand_in(monkeypatch)
        monkeypatch.setattr(mosaic_op, "plan", lambda *_: MosaicPlan("forward", 128))
        run = jax.jit(lambda h, w: call(h, w, y, backend="mosaic_gpu"))
        assert run.lower(h, w).as_text().count('"stablehlo.all_gather"') == 1
        loss, stats = run(h, w)
    expected, of_whole = linear_cross_entropy(*(x.astype(jnp.float32) for x in (h, w[:2170])), y, **options)
    np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-4)
    for x, e in zip(stats, of_whole, strict=True):
        np.testing.assert_allclose(x, e, rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------------------------------------- linear_log_probs


@slow
def log_probs_along_an_axis():
    _, _, _, ids, _ = arrays()
    whole = lambda h, w, b: linear_log_probs(h, w, ids, b, **EVERY)  # noqa: E731
    same_as_whole(whole, along_axis(linear_log_probs, tokens={"ids": ids}, **EVERY))


@check
def log_probs_on_a_mesh():
    _, _, tokens, ids, _ = arrays()
    options = {"softcap": 3.0, "temperature": tokens["temperature"], **EVERY}
    whole = lambda h, w, b: linear_log_probs(h, w, ids, b, **options)  # noqa: E731
    split = partial(
        sharded_linear_log_probs, vocab_axis="model", token_axes=(None, "data"), mesh=mesh_of(), vocab_size=V, **options
    )
    same_as_whole(whole, lambda h, w, b: split(h, padded(w), ids, padded(b)))


# ----------------------------------------------------------------------------------------------------------- linear_jsd


def jsd_along_an_axis(beta, **options):
    _, y, tokens, _, _ = arrays()
    h2, w2 = teacher()
    of_tokens = {"target": y, "token_weight": tokens["token_weight"], "teacher_hidden": h2}
    options = {"beta": beta, "temperature": 2.0, "hard_weight": 0.3, "reduction": "sum", **options}
    whole = lambda h, w, b: linear_jsd(h, w, teacher_weight=w2, student_bias=b, **of_tokens, **options)  # noqa: E731

    def op(h, w, bias, **kw):
        part = jax.lax.axis_index("model") * (PADDED // 2)
        teacher_weight = jax.lax.dynamic_slice_in_dim(padded(w2), part, PADDED // 2)
        kw["vocab"] = kw.pop("vocab_size")
        return linear_jsd(h, w, teacher_weight=teacher_weight, student_bias=bias, **kw)

    same_as_whole(whole, along_axis(op, tokens=of_tokens, **options))


@check
def jsd_along_an_axis_of_a_mixture():
    jsd_along_an_axis(0.3)


@check
def jsd_on_a_mesh_with_gradients_of_the_teacher():
    (h, w, b), y, _, _, _ = arrays()
    h2, w2 = teacher()
    options = {"beta": 0.0, "teacher_grad": True, "target": y, "temperature_squared": True, "temperature": 2.0}
    whole = lambda h2, w2, b: linear_jsd(h, w, h2, w2, student_bias=b, **options)  # noqa: E731
    split = partial(sharded_linear_jsd, vocab_axis="model", token_axes="data", mesh=mesh_of(), vocab=V, **options)
    given = h2, w2, b
    expected = jax.jit(everything(lambda *x: total(whole(*x))))(*given)
    run = everything(lambda h2, w2, b: total(split(h, padded(w), h2, padded(w2), student_bias=padded(b))))
    assert_same(jax.jit(run)(*given), expected)


def jsd_of_a_topk_teacher(kind, rest, beta):
    """On a mesh, and along an axis, of which two devices have a part of the ids each."""
    _, y, _, _, _ = arrays()
    rng = np.random.default_rng(2)
    ids = jnp.asarray(np.argsort(rng.random((B, S, V)), -1)[..., :5], jnp.int32)
    values = jnp.log(jnp.asarray(rng.random((B, S, 5)), jnp.float32) / 5)
    topk = TopK(ids, values, kind, rest)
    options = {"beta": beta, "temperature": 2.0, "hard_weight": 0.3, "target": y, "reduction": "sum"}
    whole = lambda h, w, b: linear_jsd(h, w, teacher_topk=topk, student_bias=b, **options)  # noqa: E731
    on_mesh = partial(sharded_linear_jsd, vocab_axis="model", token_axes="data", mesh=mesh_of(), vocab=V, **options)
    same_as_whole(whole, lambda h, w, b: on_mesh(h, padded(w), teacher_topk=topk, student_bias=padded(b)))

    def op(h, w, bias, ids, values, target, **kw):
        kw["vocab"] = kw.pop("vocab_size")
        return linear_jsd(h, w, teacher_topk=TopK(ids, values, kind, rest), student_bias=bias, target=target, **kw)

    of_tokens = {"ids": ids, "values": values, "target": y}
    others = {name: x for name, x in options.items() if name != "target"}
    same_as_whole(whole, along_axis(op, tokens=of_tokens, **others))


@check
def jsd_of_a_topk_teacher_with_a_tail():
    jsd_of_a_topk_teacher("log_probs", "tail", 0.3)


@slow
def jsd_of_a_truncated_topk_teacher():
    jsd_of_a_topk_teacher("log_probs", "truncated", 0.0)


@check
def jsd_of_a_renormalised_topk_teacher():
    jsd_of_a_topk_teacher("logits", "renormalised", 1.0)


@slow
def equal_models_have_a_divergence_of_nothing():
    (h, w, _), _, _, _, _ = arrays()
    split = partial(sharded_linear_jsd, vocab_axis="model", mesh=mesh_of(), vocab=V)
    found = jax.jit(jax.value_and_grad(lambda h, w: split(h, padded(w), *(arrays()[0][0], padded(arrays()[0][1])))))
    assert not any(x.any() for x in jax.tree.leaves(found(h, w)))


# --------------------------------------------------------------------------------------------------------- collectives


@check
def one_all_gather():
    """And in backward one sum, of hidden's gradient; a mixture's divergence has another all-gather."""
    (h, w, _), y, _, ids, _ = arrays()
    on_mesh = {"vocab_axis": "model", "mesh": mesh_of()}
    topk = TopK(jnp.tile(jnp.arange(3), (B, S, 1)), jnp.full((B, S, 3), -2.0), "log_probs", "tail")
    of_teacher = {"teacher_hidden": h, "teacher_weight": padded(w), "target": y, "hard_weight": 0.5}
    calls = [
        (1, partial(sharded_linear_cross_entropy, target=y, label_smoothing=0.1, z_loss=0.1, return_stats=True)),
        (1, partial(sharded_linear_cross_entropy, target=jnp.ones((B, S, PADDED)), return_stats=True)),
        (1, partial(sharded_linear_cross_entropy, target=topk._replace(kind="probs", rest="truncated"))),
        (1, partial(sharded_linear_log_probs, ids=ids, **EVERY)),
        (1, partial(sharded_linear_jsd, teacher_topk=topk)),
        (1, partial(sharded_linear_jsd, beta=1.0, **of_teacher)),
        (2, partial(sharded_linear_jsd, beta=0.5, **of_teacher)),
    ]
    for number, op in calls:
        run = lambda h, w, op=op: total(op(h, w, **on_mesh))[0]  # noqa: E731
        text = jax.jit(jax.value_and_grad(run, (0, 1))).lower(h, padded(w)).as_text()
        assert text.count('"stablehlo.all_gather"') == number
        assert text.count('"stablehlo.all_reduce"') == 1


# ----------------------------------------------------------------------------------------------------------------- slow


@slow
def jsd_along_an_axis_at_the_ends_of_beta():
    for beta in (0.0, 1.0):
        jsd_along_an_axis(beta, hard_weight=0.0)


@slow
def jsd_of_logits():
    (h, w, _), _, _, _, _ = arrays()
    h2, w2 = teacher()
    on_mesh = {"vocab_axis": "model", "token_axes": "data", "mesh": mesh_of(), "vocab": V}

    def whole(h, w, u, **options):
        return total(linear_jsd(h, w, teacher_logits=u, **options))

    def split(h, w, u, **options):
        return total(sharded_linear_jsd(h, padded(w), teacher_logits=padded(u, -1), **on_mesh, **options))

    for beta in (0.0, 0.3):
        options = {"beta": beta, "reduction": "none", "teacher_grad": True}
        found, expected = (jax.jit(everything(partial(f, **options)))(h, w, h2 @ w2.T) for f in (split, whole))
        assert_same(found, expected)


@slow
def losses_by_token():
    _, y, _, _, classes = arrays()
    options = {"reduction": "none", "class_weight": classes}
    whole = lambda h, w, b: linear_cross_entropy(h, w, y, b, **options)  # noqa: E731
    same_as_whole(whole, along_axis(linear_cross_entropy, tokens={"target": y}, **options))
    split = partial(sharded_linear_cross_entropy, vocab_axis="model", token_axes=(("data",),), mesh=mesh_of())
    same_as_whole(whole, lambda h, w, b: split(h, padded(w), y, padded(b), vocab_size=V, **options))


@slow
def sixteen_bits():
    """hidden's gradient is summed over the devices in float32, and rounded once."""
    (h, w, _), y, _, _, _ = arrays()
    on_mesh = {"vocab_axis": "model", "token_axes": "data", "mesh": mesh_of(), "vocab_size": V}
    split = partial(sharded_linear_cross_entropy, **on_mesh)
    for dtype in (jnp.bfloat16, jnp.float16):
        given = h.astype(dtype), w.astype(dtype)
        exact = jax.grad(lambda h, w: linear_cross_entropy(h, w, y), (0, 1))(*(x.astype(jnp.float32) for x in given))
        found = jax.jit(jax.grad(lambda h, w: split(h, padded(w), y), (0, 1)))(*given)
        plain = jax.jit(jax.grad(lambda h, w: linear_cross_entropy(h, w, y), (0, 1)))(*given)
        for x, p, e in zip(found, plain, exact, strict=True):
            error, bound = (jnp.linalg.norm(z.astype(jnp.float32) - e) for z in (x, p))
            assert error <= 1.5 * bound


@slow
def wrong_labels_are_nan_and_nothing_else():
    (h, w, b), y, _, _, _ = arrays()
    y = y.at[1, 1].set(V)  # padding
    split = partial(sharded_linear_cross_entropy, vocab_axis="model", mesh=mesh_of(), vocab_size=V, reduction="none")
    found = jax.jit(split)(h, padded(w), y, padded(b))
    expected = jax.jit(partial(linear_cross_entropy, reduction="none"))(h, w, y, b)
    assert jnp.isnan(found).tolist() == jnp.isnan(expected).tolist()
    assert jnp.isnan(found).sum() == 1
    with pytest.raises(ValueError, match=rf"target\[1, 1\] is {V}, which is neither"):
        split(h, padded(w), y, padded(b))


@slow
def outside_of_jit():
    """Where JAX's own shard_map runs no custom_vjp with symbolic zeros: losses alone, and gradients."""
    (h, w, b), y, _, _, _ = arrays()
    th, tw = teacher()
    ops = {
        "linear_cross_entropy": lambda h, w, b, y, th, tw, **how: linear_cross_entropy(h, w, y, b, **how),
        "linear_log_probs": lambda h, w, b, y, th, tw, **how: linear_log_probs(h, w, y, b, **how),
        "linear_jsd": lambda h, w, b, y, th, tw, **how: linear_jsd(h, w, th, tw, student_bias=b, **how),
    }
    by_token, by_entry = P("data"), P("model")
    specs = by_token, by_entry, by_entry, by_token, by_token, by_entry
    given = h, w[:68], b[:68], y.clip(max=67), th, tw[:68]
    for name, op in ops.items():
        sums = {} if name == "linear_log_probs" else {"reduction": "sum"}
        for tracked in (True, False):

            def on_device(*x, op=op, sums=sums):
                return jax.lax.psum(op(*x, axis_name="model", **sums).sum(), "data")

            split = jax.shard_map(on_device, mesh=mesh_of(), in_specs=specs, out_specs=P(), check_vma=tracked)
            whole = lambda *x, op=op, sums=sums: op(*x, **sums).sum()  # noqa: E731
            assert_same(split(*given), whole(*given))
            if tracked:
                assert_same(jax.grad(split, (0, 1))(*given), jax.grad(whole, (0, 1))(*given))


@slow
def four_devices_and_a_chunk_of_the_vocabulary():
    """A device whose entries are all padding; and tokens that none has."""
    _, y, _, _, _ = arrays()
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    more = lambda x: jnp.concatenate([padded(x), jnp.full((40, *x.shape[1:]), 7.0)])  # noqa: E731
    split = partial(sharded_linear_cross_entropy, vocab_axis="model", mesh=mesh, vocab_size=V, label_smoothing=0.1)
    for labels in (y, jnp.full_like(y, -100)):
        whole = lambda h, w, b, y=labels: linear_cross_entropy(h, w, y, b, label_smoothing=0.1)  # noqa: E731
        same_as_whole(whole, lambda h, w, b, y=labels: split(h, more(w), y, more(b)))


# ---------------------------------------------------------------------------------------------------------- the process


@pytest.mark.parametrize("which", ["checks", pytest.param("slow", marks=pytest.mark.slow)])
def test_split_vocabulary(which):
    run_checks(__file__, which, {"checks": CHECKS, "slow": SLOW}[which])


if __name__ == "__main__":
    report_checks(CHECKS, SLOW)
