"""JAX's losses whose vocabulary is split over devices, compared with the whole.  A script, whose process has four
devices from the start, runs all checks and reports each result.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import split_vocab
from on_devices import adding_to, report_checks, run_checks
from onchip.jax import (
    TopK,
    cross_entropy,
    jsd,
    linear_cross_entropy,
    linear_jsd,
    linear_log_probs,
    log_probs,
    sharded_linear_cross_entropy,
    sharded_linear_jsd,
    sharded_linear_log_probs,
)
from shared_jax import assert_same
from split_vocab import EVERY, B, S, draw, ids, mesh_of, per_token, topk, total

H, V, PADDED = 16, 69, 72
CHECKS, SLOW = {}, {}
check, slow = adding_to(CHECKS), adding_to(SLOW)
padded = partial(split_vocab.padded, size=PADDED)


# ------------------------------------------------------------------------------------------------------- of every loss

HEAD = {"hidden": draw(0, B, S, H), "weight": draw(1, V, H), "bias": draw(2, V)}
TARGET, CLASSES = {"target": ids(V)}, jnp.linspace(0, 2, V)
DENSE = {"target": jnp.abs(draw(3, B, S, V)) / V}
LOGITS = {"logits": draw(4, B, S, V)}
OF_TOKENS = per_token("token_weight", "temperature")
NUMBERS = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "logit_scale": 0.7}
STUDENT = {f"student_{name}": x for name, x in HEAD.items()}
TEACHER = {"teacher_hidden": draw(5, B, S, 8), "teacher_weight": draw(6, V, 8)}
MODELS = STUDENT | TEACHER | TARGET | per_token("token_weight")
HARD = {"temperature": 2.0, "hard_weight": 0.3}
WITH_STATS = {"return_stats": True, "label_smoothing": 0.2, "class_weight": CLASSES}
ALL, SUM, EACH = NUMBERS | WITH_STATS, {"reduction": "sum"}, {"reduction": "none"}


def some(kind="log_probs", rest="truncated"):
    return topk(V, rest, kind, k=5)


def known(kind, rest):
    return STUDENT | TARGET | {"teacher_topk": some("log_probs", rest)._replace(kind=kind)}


# By name: the loss, what it is given, the doors, and how.
CASES = {
    "ids with all numbers": (linear_cross_entropy, HEAD | TARGET | OF_TOKENS, ["axis"], NUMBERS | SUM),
    "shifted, with statistics and class weights": (
        linear_cross_entropy, HEAD | TARGET | OF_TOKENS, ["mesh"],
        WITH_STATS | {"shift": True, "weight_layout": "hv", "scratch_bytes": 100_000},
    ),
    "log-probs": (linear_log_probs, HEAD | {"ids": ids(V, 3)} | per_token("temperature"), ["mesh"],
                  {"softcap": 3.0, "token_axes": (None, "data")} | EVERY),
    "jsd of a mixture": (linear_jsd, MODELS, ["axis"], HARD | SUM | {"beta": 0.3}),
    "jsd of a top-k teacher with a tail": (
        linear_jsd, known("log_probs", "tail"), ["mesh"], HARD | SUM | {"beta": 0.3}
    ),
    "soft labels of every entry": (
        linear_cross_entropy, HEAD | DENSE | OF_TOKENS, ["axis"], ALL | EACH | {"devices": (1, 4)}
    ),
    "soft labels of some ids on a mesh": (
        linear_cross_entropy, HEAD | {"target": some("probs")} | OF_TOKENS, ["mesh"], WITH_STATS
    ),
    "logits": (cross_entropy, LOGITS | TARGET | OF_TOKENS, ["axis"], ALL | EACH),
    "logits and soft labels": (
        cross_entropy, LOGITS | DENSE | OF_TOKENS, ["axis"], ALL | SUM | {"return_stats": False}
    ),
    "log-probs of logits": (log_probs, LOGITS | {"ids": ids(V, 3)}, ["axis"], EVERY),
    "jsd of logits": (
        jsd, {"student_logits": draw(4, B, S, V), "teacher_logits": draw(7, B, S, V)}, ["axis"],
        EACH | {"beta": 0.3, "teacher_grad": True},
    ),
}  # fmt: skip
SLOW_CASES = {
    "jsd with gradients of the teacher": (
        linear_jsd, MODELS, ["mesh"],
        {"beta": 0.0, "teacher_grad": True, "temperature_squared": True, "temperature": 2.0},
    ),
    "jsd of a renormalised top-k teacher": (
        linear_jsd, known("logits", "renormalised"), ["mesh", "axis"], HARD | SUM | {"beta": 1.0}
    ),
    "soft labels of some ids": (linear_cross_entropy, HEAD | {"target": some()} | OF_TOKENS, ["axis"], ALL | EACH),
    "soft labels, shifted": (linear_cross_entropy, HEAD | DENSE | OF_TOKENS, ["mesh"], WITH_STATS | {"shift": True}),
    "logits and soft labels of some ids": (
        cross_entropy, LOGITS | {"target": some("probs")}, ["axis"], ALL | EACH | {"devices": (1, 4)}
    ),
    "log-probs along an axis": (linear_log_probs, HEAD | {"ids": ids(V, 3)}, ["axis"], EVERY),
    "jsd of a truncated top-k teacher": (
        linear_jsd, known("log_probs", "truncated"), ["mesh", "axis"], HARD | SUM | {"beta": 0.0}
    ),
    **{
        f"jsd at the end of beta={beta}": (linear_jsd, MODELS, ["axis"], SUM | {"beta": beta, "temperature": 2.0})
        for beta in (0.0, 1.0)
    },
    **{
        f"jsd of a teacher's logits, beta={beta}": (
            linear_jsd, STUDENT | {"teacher_logits": draw(7, B, S, V)}, ["mesh"],
            EACH | {"beta": beta, "teacher_grad": True},
        )
        for beta in (0.0, 0.3)
    },
    "losses by token": (linear_cross_entropy, HEAD | TARGET, ["mesh", "axis"], EACH | {"class_weight": CLASSES}),
    **{
        f"a device of padding alone, {name}": (
            linear_cross_entropy, HEAD | {"target": y}, ["mesh"],
            {"devices": (1, 4), "size": 112, "label_smoothing": 0.1},
        )
        for name, y in {"labels": ids(V), "no labels": jnp.full((B, S), -100)}.items()
    },
    "two axes": (linear_cross_entropy, HEAD | TARGET, ["mesh"], EACH | {"token_axes": (("data",),)}),
    **{
        f"soft labels in float16: {op.__name__}, {name}": (
            op, given | labels, ["axis"], SUM | {"dtype": jnp.float16, "bound": 1e-3}
        )
        for op, given, name, labels in (
            (linear_cross_entropy, HEAD, "every entry", DENSE), (cross_entropy, LOGITS, "every entry", DENSE),
            (linear_cross_entropy, HEAD, "some ids", {"target": some("probs")}),
        )
    },
}  # fmt: skip


def of_case(op, given, doors, how):
    split_vocab.compare(op, given, V, *doors, **{"size": PADDED, "scale": 4} | how)


CHECKS |= {name: partial(of_case, *case) for name, case in CASES.items()}
SLOW |= {name: partial(of_case, *case) for name, case in SLOW_CASES.items()}


# -------------------------------------------------------------------------------------------------------- of one alone


@check
def the_ambient_mesh_of_explicit_axes():
    """Under scan with `jax.checkpoint`, each micro-batch with the count of all; gradients have their arrays'
    sharding."""
    (h, w, b), y = HEAD.values(), TARGET["target"]
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
    (h, w, _), y = HEAD.values(), TARGET["target"]
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
    (h, w, b), y = HEAD.values(), TARGET["target"]
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


@slow
def equal_models_have_a_divergence_of_nothing():
    h, w, _ = HEAD.values()
    split = partial(sharded_linear_jsd, vocab_axis="model", mesh=mesh_of(), vocab=V)
    found = jax.jit(jax.value_and_grad(lambda h, w: split(h, padded(w), HEAD["hidden"], padded(HEAD["weight"]))))
    assert not any(x.any() for x in jax.tree.leaves(found(h, w)))


@check
def one_all_gather():
    """And in backward one sum, of hidden's gradient; divergences have some for each chunk of tokens."""
    (h, w, _), y = HEAD.values(), TARGET["target"]
    on_mesh = {"vocab_axis": "model", "mesh": mesh_of()}
    topk = TopK(jnp.tile(jnp.arange(3), (B, S, 1)), jnp.full((B, S, 3), -2.0), "log_probs", "tail")
    of_teacher = {"teacher_hidden": h, "teacher_weight": padded(w), "target": y, "hard_weight": 0.5}
    calls = [
        (1, partial(sharded_linear_cross_entropy, target=y, label_smoothing=0.1, z_loss=0.1, return_stats=True)),
        (1, partial(sharded_linear_cross_entropy, target=jnp.ones((B, S, PADDED)), return_stats=True)),
        (1, partial(sharded_linear_cross_entropy, target=topk._replace(kind="probs", rest="truncated"))),
        (1, partial(sharded_linear_log_probs, ids=ids(V, 3), **EVERY)),
        (3, partial(sharded_linear_jsd, teacher_topk=topk)),
        (5, partial(sharded_linear_jsd, beta=1.0, **of_teacher)),
        (6, partial(sharded_linear_jsd, beta=0.5, **of_teacher)),
    ]
    for number, op in calls:
        run = lambda h, w, op=op: total(op(h, w, **on_mesh))[0]  # noqa: E731
        text = jax.jit(jax.value_and_grad(run, (0, 1))).lower(h, padded(w)).as_text()
        assert text.count('"stablehlo.all_gather"') == number
        assert text.count('"stablehlo.all_reduce"') == 1


@slow
def sixteen_bits():
    """hidden's gradient is summed over the devices in float32, and rounded once."""
    (h, w, _), y = HEAD.values(), TARGET["target"]
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
    (h, w, b), y = HEAD.values(), TARGET["target"]
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
    (h, w, b), y = HEAD.values(), TARGET["target"]
    th, tw = TEACHER.values()
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


# ---------------------------------------------------------------------------------------------------------- the process


@pytest.mark.parametrize("which", ["checks", pytest.param("slow", marks=pytest.mark.slow)])
def test_split_vocabulary(which):
    run_checks(__file__, which, {"checks": CHECKS, "slow": SLOW}[which])


if __name__ == "__main__":
    report_checks(CHECKS, SLOW)
