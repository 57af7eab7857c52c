"""What a front end in JAX hands to a backend, under `jax.shard_map` too, and how it says that it has first derivatives
alone."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

# What stands for a label that is not in [0, V).
IGNORED = -1
OUT_OF_RANGE = -2


@dataclass(frozen=True)
class Static:
    """What is known while tracing; a call with another `Static` compiles anew."""

    backend: str
    platform: str  # "cpu", "gpu" or "tpu"
    dtype: str  # of hidden, weight and bias, of their gradients, and of what the products read
    weight_layout: str  # "vh" or "hv"
    reduction: str
    strategy: str
    scratch_bytes: int | None
    return_stats: bool

    @property
    def vocab_axis(self) -> int:
        """The dimension of weight that is the vocabulary."""
        return self.weight_layout.index("v")


class Tensors(NamedTuple):
    """The arrays of a call.  What the call doesn't use is None; numbers are float32 arrays, so that a new value does
    not compile anew."""

    hidden: jax.Array  # [T, H] float32, bfloat16 or float16
    weight: jax.Array  # [V, H], or [H, V] with layout "hv", of hidden's dtype
    labels: jax.Array  # [T] int32 in [0, V), IGNORED or OUT_OF_RANGE
    bias: jax.Array | None = None  # [V] of hidden's dtype
    token_weight: jax.Array | None = None  # [T] float32
    temperature: jax.Array | None = None  # [T] or [] float32
    normalizer: jax.Array | None = None  # [] float32
    label_smoothing: jax.Array | None = None  # [] float32, as all below
    z_loss: jax.Array | None = None
    softcap: jax.Array | None = None
    logit_scale: jax.Array | None = None


class Needs(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


def vary_alike(arrays: Any, like: Any = None) -> Any:
    """The arrays, each taken to vary over all axes of `jax.shard_map` over which any of them, or of `like`, does.

    A loop's state must vary as what is added to it does; and JAX sums the gradient of an array that is the same on all
    devices over the axes that it is made to vary over here.
    """

    def axes(x: Any) -> frozenset[str]:
        return jax.typeof(x).manual_axis_type.varying  # type: ignore[no-any-return]

    every = frozenset[str]().union(*map(axes, jax.tree.leaves((arrays, like))))

    def vary(x: Any) -> Any:
        missing = tuple(sorted(every - axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, arrays)


def refuse_second_derivative(op: str, *_: Any) -> Any:
    """The derivative, by `jax.custom_jvp`, of an op's forward and backward functions: it raises."""
    raise NotImplementedError(
        f"{op}: differentiated twice; it has first derivatives by reverse mode only (jax.grad, jax.vjp)"
    )
