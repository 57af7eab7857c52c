"""linear_cross_entropy for JAX: the public function and the choice of a backend.

`linear_cross_entropy` checks its inputs, chooses a backend and calls `_op`, to which
`onchip.frontend.jax_call.with_gradients` gives its derivatives.  `forward` plans the call and moves the tokens that
count to the front; the backend's `forward` launches kernels, or walks over XLA's own products.  The maths is in the
package's docstring.
"""

from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp

from onchip.core.backends import choose_backend
from onchip.frontend.jax_call import Planned, Static, callable_here, is_tracked, vary_alike, with_gradients
from onchip.frontend.jax_inputs import (
    accumulator,
    check_arrays,
    check_layout,
    check_normalizer,
    checked_numbers,
    dtype_of,
    options_of,
    platform,
    take_target,
)
from onchip.frontend.jax_labels import is_soft
from onchip.frontend.jax_types import Array, LossKeywords, Number, WeightLayout, WithStats
from onchip.frontend.jax_values import checked_labels
from onchip.frontend.options import Reduction, ScratchBytes, check_class_weight, check_shift, shapes_of
from onchip.frontend.topk import TopK
from onchip.ops.linear_cross_entropy import jax_soft, spec
from onchip.ops.linear_cross_entropy.spec import OP, Options, Strategy
from onchip.vocab.memory import Problem
from onchip.vocab.mosaic import op as mosaic_op
from onchip.vocab.xla import walk as jax_xla
from onchip.vocab.xla.loss import Constants, Outputs
from onchip.vocab.xla.parallel import Shard, check_axis, refuse_typed_sharding, shard_of
from onchip.vocab.xla.tiles import Projection

# Best first, by platform.
BACKENDS = {"cpu": ("xla", "mosaic_gpu"), "gpu": ("mosaic_gpu", "xla"), "tpu": ("xla", "mosaic_gpu")}
Backend = Literal["auto", "mosaic_gpu", "xla"]
MODULES: dict[str, ModuleType] = {"xla": jax_xla, "mosaic_gpu": mosaic_op}


class OfLayer(LossKeywords, total=False):
    """What a layer with this loss takes by keyword, but for labels, shift and return_stats."""

    strategy: Strategy
    backend: Backend


class OfWeight(OfLayer, total=False):
    """What a function of the weight takes by keyword, but for labels and return_stats."""

    shift: bool
    weight_layout: WeightLayout
    vocab_size: int | None


class OfHead(OfWeight, total=False):
    """What the function takes by keyword, but for labels and return_stats."""

    axis_name: str | None


@overload
def linear_cross_entropy(
    hidden: Array,
    weight: Array,
    target: Array | TopK[Array] | None = None,
    bias: Array | None = None,
    *,
    labels: Array | TopK[Array] | None = None,
    return_stats: Literal[False] = False,
    **options: Unpack[OfHead],
) -> jax.Array: ...
@overload
def linear_cross_entropy(
    hidden: Array,
    weight: Array,
    target: Array | TopK[Array] | None = None,
    bias: Array | None = None,
    *,
    labels: Array | TopK[Array] | None = None,
    return_stats: Literal[True],
    **options: Unpack[OfHead],
) -> WithStats: ...
@overload
def linear_cross_entropy(
    hidden: Array,
    weight: Array,
    target: Array | TopK[Array] | None = None,
    bias: Array | None = None,
    *,
    labels: Array | TopK[Array] | None = None,
    return_stats: bool,
    **options: Unpack[OfHead],
) -> jax.Array | WithStats: ...
def linear_cross_entropy(
    hidden: Array,  # [..., H]
    weight: Array,  # [V, H], or [H, V] with weight_layout="hv"
    target: Array | TopK[Array] | None = None,  # [...], or probabilities
    bias: Array | None = None,  # [V]
    *,
    labels: Array | TopK[Array] | None = None,  # another name of target
    weight_layout: WeightLayout = "vh",
    axis_name: str | None = None,
    vocab_size: int | None = None,
    shift: bool = False,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    normalizer: Number | None = None,
    token_weight: Array | None = None,  # [...]
    class_weight: Array | None = None,  # [V]
    label_smoothing: Number = 0.0,
    z_loss: Number = 0.0,
    softcap: Number | None = None,
    logit_scale: Number = 1.0,
    temperature: Number = 1.0,
    scratch_bytes: ScratchBytes = None,
    strategy: Strategy = "auto",
    backend: Backend = "auto",
    check_inputs: bool = False,
    return_stats: bool = False,
) -> jax.Array | WithStats:
    r"""Cross-entropy of a linear layer's output, without storing the [tokens, vocab] logits.

    With a = (hidden @ weight.T + bias) * logit_scale, z = softcap * tanh(a / softcap) / temperature (without softcap
    a / temperature) and lse = log(sum(exp(z))), the loss of a token is::

        token_weight * ((1 - label_smoothing) * (lse - z[target]) + label_smoothing * (lse - mean(z)) + z_loss * lse**2)

    'mean' divides the sum over tokens by `normalizer`, or else by the number of tokens that are not ignored.  So it is
    the mean of `optax.softmax_cross_entropy_with_integer_labels(hidden @ weight.T + bias, target)`, with float32 logits
    whatever the inputs' dtype.  It works under jit, grad, vmap, scan and `jax.checkpoint`.

    Args:
        hidden: [..., H] float32, bfloat16, float16 or float64, T tokens in the leading dimensions.  NumPy's float64
            counts as float32 where JAX's 64-bit mode is off.
        weight: [V, H], or [H, V] with weight_layout="hv" (never transposed in memory), of hidden's dtype; or one of the
            two is float32 and the other of 16 bits: the product is of 16 bits then, and each gradient of its array's
            dtype.
        target: [...] of any integer dtype: the vocabulary index of each token, or `ignore_index`.  Or soft labels, with
            sum(q * (lse - z)) in place of lse - z[target]: floating point [..., V], the probability of each entry, or
            `TopK(indices, values, kind, rest="truncated")`, that of K entries [..., K], kind being "probs" or
            "log_probs".  q need not sum to 1 and is a constant to autodiff.  All tokens count, and there is no
            ignore_index or strategy="stash"; "mosaic_gpu" and "xla" run them.
        labels: another name of target, by keyword.
        bias: [V] of hidden's dtype or weight's.  Without softcap -inf takes an entry out of the vocabulary.
        weight_layout: "vh" or "hv".
        axis_name: inside of `jax.shard_map`: the mesh axis over which the vocabulary is split.  weight and bias are
            then this device's [V / n, H] (or [H, V / n]) and [V / n], in the order of the devices; all else is the same
            on all devices of that axis, and so are the results.  Tokens may be split over another axis.
        vocab_size: with axis_name: so many entries of all devices count; those behind are padding, and may hold any
            finite numbers.  class_weight is [vocab_size].
        shift: position i of each sequence [..., S] predicts label i + 1, and the last one costs nothing, as in
            `onchip.torch`; soft labels and hidden are copied for it.  Each device must hold whole sequences inside of
            `jax.shard_map`.
        ignore_index: tokens with this target cost no loss and leave exact zeros, whatever they hold.
        reduction: "mean", "sum" or "none" (the loss then has target's shape).
        normalizer: above 0: what "mean" divides by instead of the token count, as in `onchip.torch`.
        token_weight: [...] factor of each token's loss; does not change what "mean" divides by.
        class_weight: [V] float32 or of weight's dtype, 0 or more: factors of the classes, w[target] of lse - z[target]
            and w[v] of each lse - z[v] that label smoothing adds; z-loss has none.  "mean" then divides by the sum of
            w[target] over tokens that are not ignored (by 1 where that is 0), unless there is a normalizer.
            With soft labels it multiplies each entry's probability, and "mean" divides by the number of tokens.
        label_smoothing: in [0, 1]: the part of the target's probability that is spread evenly over the vocabulary.
        z_loss: 0 or more: factor of lse**2, which keeps logits from drifting.
        softcap: above 0, or None: squashes the logits smoothly into (-softcap, softcap).
        logit_scale: above 0: factor of the logits, before softcap.
        temperature: above 0: divides the logits, after softcap; may also be a [...] array with one per token.
        scratch_bytes: bound on the temporary memory, gradients in their parameters' dtypes not counted: bytes, a text
            like "1GiB" or "300 MiB", or a float in (0, 1], that part of the float32 logits (4 * T * V bytes).  Default:
            256 MiB or an eighth of the float32 logits, whichever is more, and at least what one chunk needs; without
            gradients "mosaic_gpu" takes 64 MiB.
        strategy: "stash" does 3 matrix products: "xla" computes gradients in forward, chunk by chunk of tokens, in
            float32, and scales them in backward, and so does "mosaic_gpu" for a frozen weight and for many tokens; else
            it keeps the exponentials of up to H tokens in the memory of the weight's gradient, those of more in scratch
            as far as there is room, and computes logits of further ones again.  "recompute" computes logits again in
            backward, chunk by chunk of the vocabulary (4 products, less memory).  "auto" is what fits scratch_bytes,
            the faster first.  With "xla" and reduction="none" a gradient of weight or bias is always made by
            "recompute".
        backend: "mosaic_gpu" (kernels for Hopper, bfloat16 and float16), "xla" (plain JAX, on any device), or "auto":
            the first of these that can run.
        check_inputs: raise for labels, temperatures, weights of classes and numbers that are wrong, which waits for the
            device.  On the CPU, and of NumPy's arrays, that is so anyway, but for traced values, with which it can't be
            asked for.
        return_stats: also return per-token statistics (`LinearCrossEntropyStats`), without gradients.  An lse that is
            differentiable has `linear_log_probs`.

    The numbers normalizer, label_smoothing, z_loss, softcap, logit_scale and temperature may be 0-d arrays, traced or
    not: a new value then compiles nothing anew, but isn't checked where it is traced.  They, token_weight and
    class_weight are constants to autodiff.

    Returns:
        The loss in float32, of float64 inputs in float64, 0-d or of target's shape; with return_stats `(loss,
        LinearCrossEntropyStats)`.  If every token is ignored, "mean" is 0 with zero gradients.  Under jit, or on a
        GPU without check_inputs, a target that is neither ignore_index nor in [0, V), or a log-probability above 0,
        makes its token's loss, and the gradients that it enters, NaN.

    Raises:
        TypeError: an argument of the wrong type or dtype; forward-mode differentiation.
        ValueError: a wrong shape, range or option, or a scratch_bytes that is too small (it names the smallest); where
            values are known (see check_inputs), a target out of range, which it names.
        NotImplementedError: differentiated twice.

    Memory: `onchip plan --framework jax` prints it; `scratch_parts` of `onchip.vocab.xla.memory`
    ("xla") and `onchip.vocab.mosaic.memory` ("mosaic_gpu") are the formulas, for a jitted step.  In float32 it is about
    4 * token_chunk * vocab_chunk bytes for "recompute", and 4 * (chunk * V + V * H + T * H) for "stash".
    Under vmap each of its arrays gets the mapped dimension: give a batch as leading dimensions instead where you can.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.jax import linear_cross_entropy
        >>> hidden = jax.random.normal(jax.random.key(0), (2, 8, 16))
        >>> weight = jax.random.normal(jax.random.key(1), (100, 16))
        >>> target = jnp.arange(16).reshape(2, 8)
        >>> loss, grads = jax.jit(jax.value_and_grad(linear_cross_entropy, argnums=(0, 1)))(hidden, weight, target)
        >>> grads[1].shape
        (100, 16)

    Sources: 'stash' is the chunked loss of Liger Kernel (arXiv:2410.10989), 'recompute' that of Cut Cross-Entropy
    (arXiv:2411.09009) without its gradient filter, which makes it exact.
    """
    given = locals()
    name, target = take_target(OP, given)
    check_layout(OP, weight_layout)
    check_axis(OP, axis_name, vocab_size)
    if is_soft(target, hidden):
        refuse_soft(axis_name is not None)
        return jax_soft.run(given, name, partial(refusals, weight_layout=weight_layout, strategy="recompute"))
    assert not isinstance(target, TopK)
    options, numbers, total = checked(given, name, target)
    refuse_typed_sharding(OP, given)
    projection = Projection.of(hidden, weight, bias, weight_layout)
    shard = shard_of(OP, given, projection.vocab)
    vocab = projection.vocab if shard is None else shard.vocab
    check_class_weight(OP, shapes_of({} if class_weight is None else {"class_weight": class_weight}), vocab)
    plain = checked_labels(OP, given, name, vocab, options, target.ndim - 1 if shift else None)
    constants = Constants.of(plain, options, token_weight, normalizer, class_weight, numbers, total, shift)
    projection, constants = vary_alike((projection, constants), but=axis_name)
    static = Static(options, platform(), shard=shard)
    problem = problem_of(static, projection, constants, Projection(True, True, bias is not None))
    refused = refusals(problem, static.platform, weight_layout, strategy, shard)
    static = static._replace(backend=choose_backend(OP, backend, refused))
    empty = problem.tokens == 0
    outputs = (
        Outputs.of_nothing(reduction, return_stats, total)
        if empty
        else callable_here(_op)(static, projection, constants)
    )
    return outputs.shaped(target.shape)


def checked(given: Mapping[str, Any], name: str, target: Any) -> tuple[Options, dict[str, Any], Any]:
    """The options among the arguments of the function, its numbers and the dtype of sums; raise for what is wrong or
    doesn't fit together, but for class_weight, of which a device may have more than of the weight.

    `target` is ids, and was given by `name`.
    """
    hidden, weight = given["hidden"], given["weight"]
    shapes = shapes_of(check_arrays(OP, given))
    spec.check_shapes({x: shape for x, shape in shapes.items() if x != "class_weight"}, name, given["weight_layout"])
    options: Options = options_of(OP, Options, given, target.size * weight.size // hidden.shape[-1])
    check_shift(OP, options.shift, target.shape, f"{name} of shape [..., S]")
    check_normalizer(OP, given["normalizer"], options.reduction)
    total = accumulator(dtype_of(hidden))
    return options, checked_numbers(OP, options, given, total), total


def refuse_soft(split: bool) -> None:
    """Raise for soft labels where the vocabulary is split."""
    if split:
        raise ValueError(
            f"{OP}: the targets of a vocabulary that is split over devices are ids; got probabilities; for those give "
            "each device its tokens and the whole weight, without axis_name"
        )


def refusals(
    problem: Problem,
    platform: str,
    weight_layout: WeightLayout = "vh",
    strategy: Strategy = "auto",
    shard: Shard | None = None,
) -> dict[str, str | None]:
    """Why each backend of the platform, best first, can't serve a call, or None; `problem` is this device's."""
    names = BACKENDS.get(platform, ("xla",))
    made = {name: MODULES[name].refusal(problem, platform, weight_layout, strategy) for name in names}
    if shard is None:
        return made
    split: dict[str, str] = {}
    if strategy == "stash":
        split["xla"] = "strategy='stash' needs the softmax of a whole vocabulary at once; pass strategy='recompute'"
    if is_tracked(shard.axis):
        split["mosaic_gpu"] = (
            "it doesn't take a split vocabulary inside of a jax.shard_map with check_vma, which gradients need; call "
            f"sharded_{OP} outside of it, or pass backend='xla'"
        )
    elif shard.padded and (problem.softcap or problem.smoothing):
        split["mosaic_gpu"] = (
            "it takes padding of a split vocabulary only without softcap and label_smoothing; leave those out, or pass "
            "backend='xla'"
        )
    return {name: split.get(name, reason) for name, reason in made.items()}


def problem_of(static: Static, projection: Projection, constants: Constants, needs: Projection) -> Problem:
    """What plans and refusals depend on, where these gradients are needed."""
    return projection.problem(
        needs,
        static.platform,
        constants.transform,
        per_token_loss=static.options.reduction == "none",
        smoothing=constants.loss.label_smoothing is not None,
        stats=static.options.return_stats,
        class_weight=constants.class_weight is not None,
        split=static.shard is not None,
    )


def forward(static: Static, needs: Projection, projection: Projection, constants: Constants) -> tuple[Outputs, Planned]:
    backend, shard, strategy = MODULES[static.backend], static.shard, static.options.strategy
    if shard is not None:
        shard.refuse_untracked(OP, needs)
        strategy = "recompute" if static.backend == "xla" else strategy
    problem = problem_of(static, projection, constants, needs)
    plan = backend.plan(problem, strategy, static.options.scratch_bytes)
    call = constants.call(static.options.reduction, projection, backend.select(plan, constants.labels), shard)
    wanted = constants.loss.wanted(static.options.return_stats, constants.class_weight is not None)
    run = partial(backend.forward, plan, wanted, needs)
    stats, saved = _each(backend, run)(call)
    return call.outputs(static.options.reduction, stats), Planned(saved, plan)


def backward(static: Static, needs: Projection, saved: Planned, cotangents: Outputs) -> Projection:
    backend = MODULES[static.backend]
    upstream = jnp.zeros(()) if cotangents.loss is None else cotangents.loss
    return _each(backend, partial(backend.backward, saved.plan, needs))(saved.arrays, upstream)  # type: ignore[no-any-return]


def _each(backend: ModuleType, run: Any) -> Any:
    """Under vmap kernels serve one element after the other."""
    return jax.custom_batching.sequential_vmap(run) if backend.SEQUENTIAL else run


_op = with_gradients(OP, forward, backward)
