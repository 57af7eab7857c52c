"""Flax's layers in FP8 and with experts: `Fp8Linear` and `MoE` for nnx, `Fp8Dense` and `LinenMoE` for linen."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.typing import DTypeLike

from onchip.core.backends import choose_backend
from onchip.fp8.numbers import Fp8Options, GradDtype, Scale
from onchip.frontend.jax_inputs import accumulator, dtype_of, require_arrays
from onchip.frontend.jax_types import Array
from onchip.frontend.options import require_bool
from onchip.groups.routing import Scoring, check_groups, check_routing, check_sizes
from onchip.jax import MoEParams, MoEStats, fp8_linear, moe, update_correction_bias

Fp8Backend = Literal["auto", "mosaic_gpu", "xla"]
MoEBackend = Literal["auto", "mosaic_gpu", "triton", "xla"]
EXPERT_INIT = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=0)
"""Of the experts' weights [E, out, in]: each expert as a layer of its own."""
NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class Fp8Linear(nnx.Linear):
    """`nnx.Linear` whose three products multiply FP8 numbers: `onchip.jax.fp8_linear` with parameters of its own.

    Its arguments, its parameters (`kernel` [K, N], `bias` [N]) and their sharding are those of `nnx.Linear`, so that
    checkpoints load in both directions.  The parameters keep their dtype, and the kernel is quantised as it is: `dtype`
    casts only the input.

    Args:
        in_features, out_features, linear: the arguments of `nnx.Linear`, but for `precision`, `dot_general` and
            `preferred_element_type`, which have no meaning here.
        grad_dtype, scale, backend: as in `onchip.jax.fp8_linear`.

    A call takes `inputs` [..., K] and returns [..., N] in the dtype in which `nnx.Linear` would.  It may say the
    result's `out_sharding`, as in `nnx.Linear`.

    Raises:
        TypeError: a dtype is none of float32, bfloat16 and float16.
        ValueError: one of the three arguments was given, an option has no such value, or the backend can't run a call.

    Memory: that of `fp8_linear`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from onchip.integrations.flax import Fp8Linear
        >>> layer = Fp8Linear(256, 384, rngs=nnx.Rngs(0))
        >>> grads = nnx.grad(lambda layer: layer(jnp.ones((16, 256))).sum())(layer)
        >>> grads["kernel"].shape
        (256, 384)

    Source: `flax/nnx/nn/linear.py`; DeepSeek-V3 (arXiv:2412.19437), section 3.3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        grad_dtype: GradDtype = "e4m3",
        scale: Scale = "float32",
        backend: Fp8Backend = "auto",
        **linear: Any,
    ) -> None:
        _check_fp8("Fp8Linear", grad_dtype, scale, backend, linear)
        super().__init__(in_features, out_features, **linear)
        self.grad_dtype, self.scale, self.backend = grad_dtype, scale, backend

    def __call__(self, inputs: Array, out_sharding: Any = None) -> jax.Array:
        """See the class."""
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        x, *_ = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        out = _fp8(self, x, kernel, bias)
        return out if out_sharding is None else jax.sharding.reshard(out, out_sharding)


class Fp8Dense(linen.Dense):
    """`linen.Dense` whose three products multiply FP8 numbers.  Its attributes and parameters are those of
    `linen.Dense`, and `grad_dtype`, `scale` and `backend`; otherwise it is like `Fp8Linear`.

    Raises:
        TypeError, ValueError: as `Fp8Linear`, in the first call.

    Memory: that of `fp8_linear`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.integrations.flax import Fp8Dense
        >>> layer = Fp8Dense(384)
        >>> variables = layer.init(jax.random.key(0), jnp.ones((16, 256)))
        >>> layer.apply(variables, jnp.ones((16, 256))).shape
        (16, 384)

    Source: `flax/linen/linear.py`; DeepSeek-V3 (arXiv:2412.19437), section 3.3.
    """

    grad_dtype: GradDtype = "e4m3"
    scale: Scale = "float32"
    backend: Fp8Backend = "auto"

    @linen.compact
    def __call__(self, inputs: Array) -> jax.Array:
        """[..., N], from `inputs` [..., K]."""
        own = {name: getattr(self, name) for name in ("precision", "dot_general", "dot_general_cls")}
        _check_fp8("Fp8Dense", self.grad_dtype, self.scale, self.backend, own)
        kernel = self.param("kernel", self.kernel_init, (jnp.shape(inputs)[-1], self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        x, *_ = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        return _fp8(self, x, kernel, bias)


def _check_fp8(name: str, grad_dtype: Any, scale: Any, backend: Any, linear: Mapping[str, Any]) -> None:
    Fp8Options(grad_dtype, scale)
    choose_backend(name, backend, dict.fromkeys(("mosaic_gpu", "xla")))
    for option in ("precision", "dot_general", "dot_general_cls", "preferred_element_type"):
        if linear.get(option) not in (None, jax.lax.dot_general):
            raise ValueError(f"{name}: {option} must be left out, as the products are of FP8 numbers")


def _fp8(layer: Any, x: Array, kernel: Array, bias: Array | None) -> jax.Array:
    options = {"grad_dtype": layer.grad_dtype, "scale": layer.scale, "backend": layer.backend}
    return fp8_linear(x, kernel, bias, weight_layout="kn", **options)


# -------------------------------------------------------------------------------------------------------------- experts


class MoE(nnx.Module):
    """A mixture of experts with SwiGLU, in place of a transformer's MLP: `onchip.jax.moe` with parameters of its own.

    Each token goes to all of the `top_k` experts with the largest scores: there is no capacity, and no token is
    dropped.  The formula is `moe`'s.

    Args:
        hidden: H, the size of a token.
        intermediate: F, the inner size of an expert.
        num_experts: E.
        top_k: experts per token.
        num_shared: if above 0, every token also goes to a shared expert of inner size num_shared * F.
        norm_topk, scoring, scaling_factor, n_group, topk_group, backend: as in `moe`.
        correction_bias: give the layer an `e_score_correction_bias`, an `nnx.BatchStat` [E] float32 of zeros, which is
            added to the scores when experts are chosen.  `update_correction_bias` changes it.
        use_bias: whether the router and all experts add biases.
        dtype: the dtype in which the experts compute; None for the one to which x and the experts promote.  The router
            computes in float32.
        param_dtype: of the parameters; the router's is float32 (float64 if this is).
        kernel_init: initialiser of the kernels of the router and of the shared expert, as in `nnx.Linear`.
        gate_up_init, down_init: initialisers of weights [E, out, in].
        bias_init: initialiser of biases.
        rngs: random keys, as in `nnx.Linear`.
        router_metadata, gate_up_metadata, down_metadata, shared_gate_up_metadata, shared_down_metadata: metadata of
            these weights, as `kernel_metadata` in `nnx.Linear`: {"out_sharding": ("expert", None, None)}, say.

    The parameters are gate_up [E, 2 F, H], whose first F rows are the gate's, and down [E, H, F], as in PyTorch and in
    transformers; with `use_bias` also gate_up_bias [E, 2 F] and down_bias [E, H].  router and, with num_shared,
    shared_gate_up and shared_down are `nnx.Linear`.

    A call takes x [..., H] and returns y of the same shape, in the dtype in which the experts compute.  With
    `return_stats=True` it returns (y, `MoEStats`).  Add a small part of their aux_loss to the loss (0.01 in Switch), or
    of their z_loss (0.001 in ST-MoE).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a size is below 1, top_k is above num_experts, or an option has no such value; in a call, a shape is
            wrong, or the backend can't run it.

    Memory: that of `moe`, and copies of the experts if their dtype isn't the one in which they compute.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from onchip.integrations.flax import MoE
        >>> layer = MoE(16, 32, num_experts=4, top_k=2, rngs=nnx.Rngs(0))
        >>> y, stats = layer(jnp.ones((2, 5, 16)), return_stats=True)
        >>> y.shape, int(stats.counts.sum())
        ((2, 5, 16), 20)

    Sources: those of `moe`.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        *,
        num_shared: int = 0,
        norm_topk: bool = True,
        scoring: Scoring = "softmax",
        scaling_factor: float = 1.0,
        correction_bias: bool = False,
        n_group: int = 1,
        topk_group: int = 1,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Any = nnx.initializers.lecun_normal(),  # noqa: B008
        gate_up_init: Any = EXPERT_INIT,
        down_init: Any = EXPERT_INIT,
        bias_init: Any = nnx.initializers.zeros_init(),  # noqa: B008
        backend: MoEBackend = "auto",
        rngs: nnx.Rngs,
        router_metadata: Mapping[str, Any] = NO_METADATA,
        gate_up_metadata: Mapping[str, Any] = NO_METADATA,
        down_metadata: Mapping[str, Any] = NO_METADATA,
        shared_gate_up_metadata: Mapping[str, Any] = NO_METADATA,
        shared_down_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        check_sizes("MoE", {"hidden": hidden})
        self.hidden, self.intermediate, self.num_experts, self.top_k = hidden, intermediate, num_experts, top_k
        self.num_shared, self.norm_topk, self.scoring = num_shared, norm_topk, scoring
        self.scaling_factor = scaling_factor
        self.n_group, self.topk_group, self.use_bias = n_group, topk_group, use_bias
        self.dtype, self.param_dtype, self.backend = dtype, param_dtype, backend
        _check_moe("MoE", self, correction_bias)

        def weight(init: Any, shape: tuple[int, ...], metadata: Mapping[str, Any] = NO_METADATA) -> Any:
            return nnx.Param(init(rngs.params(), shape, param_dtype), **metadata)

        def linear(inputs: int, outputs: int, metadata: Mapping[str, Any], **dtypes: Any) -> nnx.Linear:
            options = {"kernel_init": kernel_init, "bias_init": bias_init, "kernel_metadata": metadata, "rngs": rngs}
            return nnx.Linear(inputs, outputs, use_bias=use_bias, **options, **dtypes)

        wide, total = 2 * intermediate, accumulator(param_dtype)
        self.router = linear(hidden, num_experts, router_metadata, param_dtype=total)
        self.gate_up = weight(gate_up_init, (num_experts, wide, hidden), gate_up_metadata)
        self.down = weight(down_init, (num_experts, hidden, intermediate), down_metadata)
        self.gate_up_bias = weight(bias_init, (num_experts, wide)) if use_bias else nnx.data(None)
        self.down_bias = weight(bias_init, (num_experts, hidden)) if use_bias else nnx.data(None)
        zeros = jnp.zeros(num_experts, total) if correction_bias else None
        self.e_score_correction_bias = nnx.data(None) if zeros is None else nnx.BatchStat(zeros)
        self.shared_gate_up = self.shared_down = nnx.data(None)
        if num_shared > 0:
            inner, dtypes = num_shared * intermediate, {"dtype": dtype, "param_dtype": param_dtype}
            self.shared_gate_up = linear(hidden, 2 * inner, shared_gate_up_metadata, **dtypes)
            self.shared_down = linear(inner, hidden, shared_down_metadata, **dtypes)

    @overload
    def __call__(self, x: Array, *, return_stats: Literal[False] = False) -> jax.Array: ...
    @overload
    def __call__(self, x: Array, *, return_stats: Literal[True]) -> tuple[jax.Array, MoEStats[jax.Array]]: ...
    def __call__(self, x: Array, *, return_stats: bool = False) -> Any:
        """See the class."""
        _check_tokens("MoE", x, self.hidden, return_stats)

        def read(variable: Any) -> Any:
            return None if variable is None else variable[...]

        return _experts(
            self,
            x,
            (read(self.router.kernel), read(self.router.bias)),
            [read(p) for p in (self.gate_up, self.down, self.gate_up_bias, self.down_bias)],
            read(self.e_score_correction_bias),
            (self.shared_gate_up, self.shared_down),
            return_stats,
        )

    def update_correction_bias(self, counts: Array, rate: float = 0.001) -> None:
        """e_score_correction_bias += rate * sign(mean(counts) - counts): experts with too many tokens get fewer.

        Call it once a step, after the gradients: a forward that is recomputed must choose the same experts.

        Args:
            counts, rate: as in `onchip.jax.update_correction_bias`.

        Raises:
            TypeError, ValueError: what that raises.  Also for a layer without a correction bias.

        Memory: a few arrays of E numbers.

        Example:
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> from onchip.integrations.flax import MoE
            >>> layer = MoE(16, 32, 4, 2, scoring="sigmoid", correction_bias=True, rngs=nnx.Rngs(0))
            >>> layer.update_correction_bias(jnp.array([2, 0, 1, 1]), rate=0.5)
            >>> layer.e_score_correction_bias[...].tolist()
            [-0.5, 0.5, 0.0, 0.0]

        Source: Loss-Free Balancing (arXiv:2408.15664).
        """
        bias = self.e_score_correction_bias
        if bias is None:
            raise ValueError("MoE.update_correction_bias: the layer has none; make it with correction_bias=True")
        bias[...] = update_correction_bias(bias[...], counts, rate)


class LinenMoE(linen.Module):
    """`MoE` for linen: its attributes are the arguments of `MoE`, but for `hidden`, which is x's, and for metadata.

    Its parameters have the names of `MoE`'s.  Initialisers may be those of `linen.with_partitioning`.  The correction
    bias is in the collection "batch_stats"; after a step, change it by `onchip.jax.update_correction_bias`.

    Raises:
        TypeError, ValueError: as `MoE`, in the first call.

    Memory: that of `MoE`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.integrations.flax import LinenMoE
        >>> layer = LinenMoE(32, num_experts=4, top_k=2)
        >>> x = jnp.ones((2, 5, 16))
        >>> variables = layer.init(jax.random.key(0), x)
        >>> y, stats = layer.apply(variables, x, return_stats=True)
        >>> y.shape, int(stats.counts.sum())
        ((2, 5, 16), 20)

    Sources: those of `moe`.
    """

    intermediate: int
    num_experts: int
    top_k: int
    num_shared: int = 0
    norm_topk: bool = True
    scoring: Scoring = "softmax"
    scaling_factor: float = 1.0
    correction_bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    use_bias: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Any = nnx.initializers.lecun_normal()
    gate_up_init: Any = EXPERT_INIT
    down_init: Any = EXPERT_INIT
    bias_init: Any = nnx.initializers.zeros_init()
    backend: MoEBackend = "auto"

    @linen.compact
    def __call__(self, x: Array, *, return_stats: bool = False) -> Any:
        """y [..., H], from x [..., H]; with `return_stats` also `MoEStats`."""
        _check_moe("LinenMoE", self, self.correction_bias)
        _check_tokens("LinenMoE", x, None, return_stats)
        hidden, wide, total = x.shape[-1], 2 * self.intermediate, accumulator(self.param_dtype)
        options = {"use_bias": self.use_bias, "kernel_init": self.kernel_init, "bias_init": self.bias_init}

        def weight(name: str, init: Any, *shape: int) -> Any:
            return self.param(name, init, (self.num_experts, *shape), self.param_dtype)

        def bias(name: str, *shape: int) -> Any:
            return weight(name, self.bias_init, *shape) if self.use_bias else None

        def dense(name: str, features: int) -> linen.Dense:
            return linen.Dense(features, dtype=self.dtype, param_dtype=self.param_dtype, name=name, **options)

        router = _DenseParameters(self.num_experts, param_dtype=total, name="router", **options)(x)
        of_experts = [weight("gate_up", self.gate_up_init, wide, hidden)]
        of_experts.append(weight("down", self.down_init, hidden, self.intermediate))
        of_experts += [bias("gate_up_bias", wide), bias("down_bias", hidden)]
        correction: Any = None
        if self.correction_bias:
            name = "e_score_correction_bias"
            correction = self.variable("batch_stats", name, jnp.zeros, self.num_experts, total).value
        shared: Any = (None, None)
        if self.num_shared > 0:
            inner = self.num_shared * self.intermediate
            shared = dense("shared_gate_up", 2 * inner), dense("shared_down", hidden)
        return _experts(self, x, router, of_experts, correction, shared, return_stats)


class _DenseParameters(linen.Dense):
    """The parameters of a `linen.Dense`, kernel and bias."""

    @linen.compact
    def __call__(self, inputs: Array) -> Any:
        kernel = self.param("kernel", self.kernel_init, (inputs.shape[-1], self.features), self.param_dtype)
        return kernel, self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None


def _check_moe(name: str, layer: Any, correction_bias: Any) -> None:
    sizes = {x: getattr(layer, x) for x in ("intermediate", "num_experts", "top_k", "num_shared")}
    check_sizes(name, sizes, may_be_0=("num_shared",))
    if layer.top_k > layer.num_experts:
        raise ValueError(f"{name}: top_k must be at most num_experts={layer.num_experts}; got {layer.top_k}")
    check_routing(name, layer.norm_topk, layer.scoring, layer.scaling_factor)
    check_groups(name, layer.num_experts, layer.top_k, layer.n_group, layer.topk_group)
    require_bool(name, "correction_bias", correction_bias)
    require_bool(name, "use_bias", layer.use_bias)
    choose_backend(name, layer.backend, dict.fromkeys(("mosaic_gpu", "xla", "triton")))
    for option in ("dtype", "param_dtype"):
        dtype = getattr(layer, option)
        if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{name}: {option} must be a floating-point dtype; got {dtype}")


def _check_tokens(name: str, x: Any, hidden: int | None, return_stats: Any) -> None:
    require_bool(name, "return_stats", return_stats)
    require_arrays(name, {"x": x}, ())
    if not jnp.issubdtype(dtype_of(x), jnp.floating):
        raise TypeError(f"{name}: x must have a floating-point dtype; got {x.dtype}")
    if x.ndim < 1 or (hidden is not None and x.shape[-1] != hidden):
        known = "" if hidden is None else f" with H={hidden}"
        raise ValueError(f"{name}: x must be [..., H]{known}; got shape {list(x.shape)}")


def _experts(
    layer: Any,  # its attributes are options
    x: Array,
    router: tuple[Any, Any],
    of_experts: list[Any],  # gate_up, down and their biases
    correction_bias: Any,
    shared: tuple[Any, Any],  # layers
    return_stats: bool,
) -> Any:
    """What a layer returns."""
    dtype = jnp.result_type(x, of_experts[0]) if layer.dtype is None else layer.dtype
    x = jnp.asarray(x, dtype)
    gate_up, down, *biases = [None if p is None else jnp.asarray(p, dtype) for p in of_experts]
    params = MoEParams(router[0].T, gate_up, down, None, None, router[1], *biases)
    y, stats = moe(
        params,
        x,
        top_k=layer.top_k,
        norm_topk=layer.norm_topk,
        scoring=layer.scoring,
        scaling_factor=layer.scaling_factor,
        correction_bias=correction_bias,
        n_group=layer.n_group,
        topk_group=layer.topk_group,
        backend=layer.backend,
    )
    gate_up_of_all, down_of_all = shared
    if gate_up_of_all is not None:
        gate, up = jnp.split(gate_up_of_all(x), 2, -1)
        y = y + down_of_all(jax.nn.silu(gate) * up)
    return (y, stats) if return_stats else y
