"""How devices share the work of JAX's ops under plain `jit`, however arrays are split.  A script, whose process has
four devices from the start, runs all checks and reports each result.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from on_devices import adding_to, report_checks, run_checks
from onchip.jax import fp8_linear, grouped_matmul, linear_cross_entropy
from shared_jax import assert_same
from test_data_parallel_jax import OPTIMISED, H, arrays, expected, gradients, mesh_of, placed

CHECKS, SLOW = {}, {}
slow = adding_to(SLOW)


def accumulated(h, w, y):
    """Gradients of microbatches whose number divides the axis of the batch: each has a part of it alone."""

    def step(sums, given):
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(linear_cross_entropy, 1)(given[0], w, given[1])), None

    return jax.lax.scan(step, (0.0, jnp.zeros_like(w)), [x.reshape(2, -1, *x.shape[1:]) for x in (h, y)])[0]


def sliced(h, w, y):
    return jax.value_and_grad(linear_cross_entropy, (0, 1))(h[:, :-1], w, y[:, 1:])


def constrained(h, w, y):
    """To a vocabulary that devices can't share evenly."""
    split = NamedSharding(mesh_of("dp", "tp"), P("tp"))

    def op(h, w):
        return linear_cross_entropy(h, jax.lax.with_sharding_constraint(w, split) if on_a_mesh() else w, y % 511)

    return jax.value_and_grad(op, (0, 1))(h, w[:511])


def on_a_mesh():
    return not jax.sharding.get_abstract_mesh().empty


BOTH = (("dp", "tp"),)
SHARED = {
    "microbatches": (accumulated, (("dp",), (), ("dp",)), ("dp",)),
    "microbatches, two axes": (accumulated, (BOTH, BOTH, BOTH), ("dp", "tp")),
    "sequences without their last token": (sliced, (("dp", "tp"), (), ("dp", "tp")), ("dp", "tp")),
    "an uneven vocabulary": (constrained, (("dp",), (), ("dp",)), ("dp", "tp")),
    "a vocabulary over two axes": (gradients(linear_cross_entropy), ((), BOTH, ()), ("dp", "tp")),
    "a vocabulary over the tokens' axis too": (gradients(linear_cross_entropy), (("dp",), BOTH, ("dp",)), ("dp", "tp")),
    "features over another axis": (gradients(linear_cross_entropy), (("dp",), (None, "tp"), ("dp",)), ("dp", "tp")),
}


def shares_the_work(step, specs, names):
    """However arrays are split, each device has a quarter of the products."""
    given = arrays(8, 64, 32, 512)
    alone = jax.jit(step).lower(*given).compile(OPTIMISED)
    mesh = mesh_of(*names)
    with jax.set_mesh(mesh):
        placed_ = placed(mesh, specs, given)
        spread = jax.jit(step).lower(*placed_).compile(OPTIMISED)
        assert_same(spread(*placed_), alone(*given), scale=4)
    assert spread.cost_analysis()["flops"] < 0.27 * alone.cost_analysis()["flops"]


for _name, _given in SHARED.items():
    SLOW[f"{_name}, shared"] = partial(shares_the_work, *_given)
CHECKS["microbatches, shared"] = SLOW.pop("microbatches, shared")


def shares_more_work(op, given, specs, names, memory):
    """The same for other ops, and for the memory."""
    step = jax.value_and_grad(op, tuple(range(len(given))))
    alone = jax.jit(step).lower(*given).compile(OPTIMISED)
    mesh = mesh_of(*names)
    given = placed(mesh, specs, given)
    spread = jax.jit(step).lower(*given).compile(OPTIMISED)
    costs = [(x.cost_analysis()["flops"], x.memory_analysis().temp_size_in_bytes) for x in (alone, spread)]
    assert costs[1][0] < 0.27 * costs[0][0], costs
    assert costs[1][1] < memory * costs[0][1], costs


def of_experts_twice(x, up, down):
    """As a mixture of experts: rows that the first product reads are those to which the second adds."""
    rows, sizes = jnp.arange(2 * len(x))[::-1] // 2, jnp.array([400, 0, 224, 400])
    inner = grouped_matmul(x, up, sizes, rows=rows)
    return jnp.square(grouped_matmul(inner, down, sizes, scatter_rows=rows, num_rows=len(x))).sum()


_rng = np.random.default_rng(0)
_X, _W, _UP, _DOWN, _ROWS = (
    np.float32(_rng.standard_normal(shape)) for shape in ((4, 512, 96), (256, 96), (4, 64, 32), (4, 32, 64), (512, 32))
)
SLOW |= {
    f"fp8_linear, {name}, shared": partial(
        shares_more_work, lambda x, w: jnp.square(fp8_linear(x, w)).sum(), (_X, _W), specs, names, 0.4
    )
    for name, specs, names in (
        ("sequences", ((None, "dp"), ()), ("dp",)),
        ("batch and sequences", (("dp", "tp"), ()), ("dp", "tp")),
        ("columns", (("dp",), ("tp",)), ("dp", "tp")),
        ("features", (("dp", None, "tp"), (None, "tp")), ("dp", "tp")),
    )
}
SLOW["rows of groups, shared"] = partial(
    shares_more_work, of_experts_twice, (_ROWS, _UP, _DOWN), (("dp",), (), ()), ("dp",), 0.45
)


@slow
def gspmd():
    """Another of XLA's partitioners, which doesn't use rules."""
    mesh, given = mesh_of("dp"), arrays()
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        for specs in ((("dp",), (), ("dp",)), (("dp",), ("dp",), ("dp",)), ((), ("dp",), ())):
            compiled = gradients(linear_cross_entropy).lower(*placed(mesh, specs, given)).compile(OPTIMISED)
            made = compiled(*placed(mesh, specs, given))
            assert_same(made, expected(linear_cross_entropy), scale=4)
            assert [x.sharding.spec for x in made[1]] == [P(*spec) for spec in specs[:2]]
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


@slow
def what_devices_cannot_share():
    """Where no dimension of the tokens is even, each computes them all, and a warning says so."""
    mesh = mesh_of("dp")

    def op(h, w, y):
        return linear_cross_entropy(h.reshape(-1, H)[1:], w, y.reshape(-1)[1:])

    with pytest.warns(UserWarning, match=r"31 tokens of an array \[31, 16\] are sharded over mesh axes \['dp'\]"):
        made = gradients(op)(*placed(mesh, (("dp",), (), ("dp",)), arrays()))
    assert_same(made, expected(op))


@pytest.mark.parametrize("which", ["checks", pytest.param("slow", marks=pytest.mark.slow)])
def test_shared_work(which):
    run_checks(__file__, which, {"checks": CHECKS, "slow": SLOW}[which])


if __name__ == "__main__":
    report_checks(CHECKS, SLOW)
