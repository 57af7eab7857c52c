"""Flax's layers in FP8 and its mixtures of experts: compared with onchip's functions, with the layers that they replace
and with transformers' experts; and on four devices.  A script, whose process has four devices from the
start, runs the checks of several.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from on_devices import adding_to, report_checks, run_checks
from onchip.integrations.flax import Fp8Dense, Fp8Linear, LinenMoE, MoE
from onchip.jax import MoEParams, fp8_linear, moe
from shared_jax import assert_same

CHECKS = {}
check = adding_to(CHECKS)
x = jax.random.normal(jax.random.key(0), (4, 6, 16))
SIZES = {"hidden": 16, "intermediate": 24, "num_experts": 6, "top_k": 2}
DEEPSEEK = {"scoring": "sigmoid", "scaling_factor": 2.5, "num_shared": 2, "n_group": 3, "topk_group": 2}


def random_bias(key, shape, dtype):
    return jax.random.normal(key, shape, dtype)


def of_nnx(kind, *sizes, **options):
    graph, state = nnx.split(kind(*sizes, bias_init=random_bias, rngs=nnx.Rngs(0), **options))
    return state, lambda state, *given, **named: nnx.merge(graph, state)(*given, **named)


def of_linen(kind, *sizes, **options):
    layer = kind(*sizes, bias_init=random_bias, **options)
    return layer.init(jax.random.key(0), x), layer.apply


# ------------------------------------------------------------------------------------------------------------------ FP8

LINEAR = {
    "Fp8Linear": (of_nnx, Fp8Linear, nnx.Linear, (16, 40)),
    "Fp8Dense": (of_linen, Fp8Dense, linen.Dense, (40,)),
}


@pytest.mark.parametrize(("make", "ours", "theirs", "sizes"), LINEAR.values(), ids=LINEAR)
def test_linear_is_the_layer_in_fp8(make, ours, theirs, sizes):
    """From the layer's own parameters: what fp8_linear makes of them and their gradients, and nearly what it makes."""
    (mine, layer), (params, plain) = make(ours, *sizes, scale="power_of_two"), make(theirs, *sizes)
    assert_same(mine, params)
    kernel, bias = sorted(jax.tree.leaves(mine), key=lambda a: -a.ndim)

    def wanted(kernel, bias, x):
        return jnp.square(fp8_linear(x, kernel, bias, weight_layout="kn", scale="power_of_two")).mean()

    got = jax.jit(jax.value_and_grad(lambda params, x: jnp.square(layer(params, x)).mean(), (0, 1)))(mine, x)
    value, (of_kernel, of_bias, of_x) = jax.jit(jax.value_and_grad(wanted, (0, 1, 2)))(kernel, bias, x)
    assert_same((got[0], got[1][1]), (value, of_x))
    assert_same(sorted(jax.tree.leaves(got[1][0]), key=lambda a: -a.ndim), [of_kernel, of_bias])
    out, right = layer(mine, x), plain(params, x)
    assert 0 < np.linalg.norm(out - right) < 0.05 * np.linalg.norm(right)


@pytest.mark.parametrize(("make", "ours", "theirs", "sizes"), LINEAR.values(), ids=LINEAR)
def test_linear_computes_in_the_layers_dtype(make, ours, theirs, sizes):
    """The kernel is quantised as it is, not as `dtype` would round it."""
    for options, given in (({"dtype": jnp.bfloat16}, x), ({}, x.astype(jnp.bfloat16)), ({"use_bias": False}, x)):
        (params, layer), (_, plain) = make(ours, *sizes, **options), make(theirs, *sizes, **options)
        made = layer(params, given)
        assert made.dtype == plain(params, given).dtype
        kernel, *bias = sorted(jax.tree.leaves(params), key=lambda a: -a.ndim)
        assert (made == fp8_linear(given.astype(made.dtype), kernel, *bias, weight_layout="kn")).all()


# -------------------------------------------------------------------------------------------------------------- experts


def params_of(state, correction="e_score_correction_bias"):
    """A layer's parameters as `moe` takes them, and its correction bias."""
    state = nnx.to_pure_dict(state) if isinstance(state, nnx.State) else state["params"] | state.get("batch_stats", {})
    router, shared = state["router"], [state.get(f"shared_{name}") for name in ("gate_up", "down")]
    of_experts = [state.get(name) for name in ("gate_up_bias", "down_bias")]
    given = [None if s is None else s["kernel"].T for s in shared]
    made = MoEParams(router["kernel"].T, state["gate_up"], state["down"], *given, router.get("bias"), *of_experts)
    return made, state.get(correction)


MOES = {"MoE": (of_nnx, MoE, SIZES), "LinenMoE": (of_linen, LinenMoE, {k: SIZES[k] for k in list(SIZES)[1:]})}


@pytest.mark.parametrize(("make", "ours", "sizes"), MOES.values(), ids=MOES)
@pytest.mark.parametrize("options", [{"use_bias": True}, DEEPSEEK | {"norm_topk": False}], ids=str)
def test_layer_is_the_function_of_its_parameters(make, ours, sizes, options):
    state, layer = make(ours, **sizes, **options)
    params, _ = params_of(state)
    step = jax.jit(jax.value_and_grad(partial(loss, partial(layer, return_stats=True)), (0, 1)))
    got, want = step(state, x), step_of_moe(tuple(options.items()))(params, x)
    assert_same((got[0], got[1][1]), (want[0], want[1][1]))
    assert_same(params_of(got[1][0])[0], want[1][0])
    if "use_bias" in options:
        alone, beside = jax.jit(lambda state, x: (layer(state, x), layer(state, x, return_stats=True)[0]))(state, x)
        assert (alone == beside).all()


def loss(run, state, x):
    y, stats = run(state, x)
    return jnp.square(y + x).mean() + 0.1 * stats.aux_loss + 0.01 * stats.z_loss


@cache
def step_of_moe(options):
    """Compiled once for both classes."""
    routing = {name: v for name, v in options if name not in ("use_bias", "num_shared")}
    run = partial(moe, top_k=2, **routing)
    return jax.jit(jax.value_and_grad(partial(loss, run), (0, 1)))


def test_both_have_the_same_parameters_and_each_expert_starts_as_a_layer_of_its_own():
    options = DEEPSEEK | {"use_bias": True, "correction_bias": True}
    (mine, _), (theirs, _) = (make(ours, **sizes, **options) for make, ours, sizes in MOES.values())
    shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(mine))
    assert shapes == jax.tree.map(jnp.shape, theirs["params"] | theirs["batch_stats"])
    wide, _ = of_nnx(MoE, 256, 128, 4, 2)
    for name, inputs in (("gate_up", 256), ("down", 128)):
        assert abs(wide[name][...].std() * inputs**0.5 - 1) < 0.02


@pytest.mark.parametrize(("make", "ours", "sizes"), MOES.values(), ids=MOES)
def test_experts_compute_in_their_dtype_and_the_router_in_float32(make, ours, sizes):
    state, layer = make(ours, **sizes, dtype=jnp.bfloat16, num_shared=1)
    y, stats = jax.eval_shape(lambda: layer(state, x, return_stats=True))
    assert (y.dtype, stats.mean_prob.dtype) == (jnp.bfloat16, jnp.float32)
    grads = jax.eval_shape(jax.grad(lambda s: layer(s, x).sum()), state)
    assert {a.dtype for a in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    narrow, layer = make(ours, **sizes, param_dtype=jnp.bfloat16)
    assert {p.dtype.name for p in jax.tree.leaves(params_of(narrow)[0])} == {"bfloat16", "float32"}
    assert params_of(narrow)[0].router.dtype == jnp.float32
    assert jax.eval_shape(layer, narrow, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_a_correction_bias_chooses_and_is_not_trained():
    layer = MoE(**SIZES, scoring="sigmoid", correction_bias=True, rngs=nnx.Rngs(0))
    layer.e_score_correction_bias[...] = jnp.float32([9, 9, 0, 0, 0, 0])

    @nnx.jit
    def step(layer):
        counts = layer(x, return_stats=True)[1].counts
        layer.update_correction_bias(counts, rate=0.5)
        return counts, nnx.grad(lambda layer: layer(x).sum())(layer)

    counts, grads = step(layer)
    assert counts.tolist() == [24, 24, 0, 0, 0, 0]
    assert layer.e_score_correction_bias[...].tolist() == [8.5, 8.5, 0.5, 0.5, 0.5, 0.5]
    assert set(grads) == {"router", "gate_up", "down"}
    state, linen_layer = of_linen(LinenMoE, **MOES["LinenMoE"][2], correction_bias=True)
    state["batch_stats"]["e_score_correction_bias"] = jnp.float32([9, 9, 0, 0, 0, 0])
    assert linen_layer(state, x, return_stats=True)[1].counts.tolist() == [24, 24, 0, 0, 0, 0]


def test_weights_of_transformers_qwen3_load():
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"hidden_size": 16, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**sizes, norm_topk_prob=True, experts_implementation="eager")
    block = Qwen3MoeSparseMoeBlock(config)
    with torch.no_grad():
        for p in block.parameters():
            p.normal_(std=0.2)
    layer = MoE(16, 24, num_experts=6, top_k=2, norm_topk=True, rngs=nnx.Rngs(0))
    weights = {name: jnp.asarray(p.detach().numpy()) for name, p in block.named_parameters()}
    layer.router.kernel[...] = weights["gate.weight"].T
    layer.gate_up[...], layer.down[...] = weights["experts.gate_up_proj"], weights["experts.down_proj"]
    assert_same(layer(x), block(torch.tensor(np.asarray(x))).detach().numpy())


# ------------------------------------------------------------------------------------------------------ several devices


def spread(kind, sizes, options, axes, of_axes, bound):
    """A step's value and gradients, with tokens and these weights on four devices, are those of one device."""

    @nnx.jit
    def step(layer, x):
        return nnx.value_and_grad(lambda layer: jnp.square(layer(x)).mean())(layer)

    want = step(kind(*sizes, rngs=nnx.Rngs(0), **options), x)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(of_axes,))
    metadata = {f"{name}_metadata": {"out_sharding": spec} for name, spec in axes.items()}
    with jax.set_mesh(mesh):
        layer = kind(*sizes, rngs=nnx.Rngs(0), **options, **metadata)
        value, grads = step(layer, jax.device_put(x, NamedSharding(mesh, P("data"))))
    assert_same(value, want[0])
    for name, spec in axes.items():
        placed = (getattr(layer, name), *([grads[name]] if of_axes == AxisType.Explicit else []))
        assert {tuple(p[...].sharding.spec).index("data") for p in placed} == {spec.index("data")}
        grad, right = (np.asarray(made[name][...]) for made in (grads, want[1]))
        assert np.linalg.norm(grad - right) <= bound * np.linalg.norm(right)


@check
def experts_with_sharded_weights():
    options = {"num_shared": 1, "use_bias": True, "scoring": "sigmoid"}
    weights = {"gate_up": (None, "data", None), "down": (None, None, "data")}
    spread(MoE, SIZES.values(), options, weights, AxisType.Explicit, 1e-6)


@check
def a_linear_layer_with_a_sharded_kernel():
    """The rows of one device have scales of their own in the weight's gradient, whose roundings differ then."""
    spread(Fp8Linear, (16, 40), {}, {"kernel": (None, "data"), "bias": ("data",)}, AxisType.Auto, 0.05)


@check
def linen_with_partitioning():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    init = linen.with_partitioning(nnx.initializers.normal(0.1), (None, "data", None))
    layer = LinenMoE(24, num_experts=6, top_k=2, gate_up_init=init)
    specs = linen.get_partition_spec(jax.eval_shape(layer.init, jax.random.key(0), x))
    assert specs["params"]["gate_up"] == P(None, "data", None)
    variables = linen.unbox(layer.init(jax.random.key(0), x))
    placed = jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), variables, specs)
    step = jax.jit(jax.value_and_grad(lambda variables, x: jnp.square(layer.apply(variables, x)).mean()))
    assert_same(step(placed, jax.device_put(x, NamedSharding(mesh, P("data")))), step(variables, x))


@check
def results_out_sharding():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        made = Fp8Linear(16, 40, rngs=nnx.Rngs(0))(x, out_sharding=P(None, None, "data"))
        assert made.sharding.spec == P(None, None, "data")


def test_several_devices():
    run_checks(__file__, "checks", CHECKS)


if __name__ == "__main__":
    report_checks(CHECKS, {})
