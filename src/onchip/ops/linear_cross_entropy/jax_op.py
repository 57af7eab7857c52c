"""linear_cross_entropy for JAX: the public functions and the choice of a backend.

They check their inputs and call `_op`, the operator of `onchip.vocab.jax_loss`.  The package's docstring has the maths.
"""

from dataclasses import replace
from typing import Any, Generic, Required, Unpack, overload

import jax
from jax.sharding import AbstractMesh, Mesh

from onchip.frontend import topk
from onchip.frontend.jax_call import Static
from onchip.frontend.jax_inputs import (
    accumulator,
    check_layout,
    check_normalizer,
    checked_numbers,
    dtype_of,
    options_of,
    platform,
    take_target,
    unsplit,
)
from onchip.frontend.jax_labels import check_labels, with_the_last, without_ends
from onchip.frontend.jax_mesh import BY_TOKEN, WHOLE, OnMesh, Roles, TokenAxes, check_types
from onchip.frontend.jax_spread import by_tokens
from onchip.frontend.jax_types import Array, JaxLossKeywords, Number, Target, WeightLayout, WithStats
from onchip.frontend.options import Flag, No, Reduction, ScratchBytes, Yes, check_class_weight, check_shift, shapes_of
from onchip.kernels.triton.jax_front import by_torch
from onchip.ops.linear_cross_entropy import OP, LinearCrossEntropyOptions, Strategy
from onchip.vocab import jax_loss
from onchip.vocab.jax_ways import Backend
from onchip.vocab.xla import parallel
from onchip.vocab.xla.loss import Given, XlaLossOutputs
from onchip.vocab.xla.parallel import Shard
from onchip.vocab.xla.tiles import XlaProjection

ON_MESH = f"sharded_{OP}"
Bias = Array | None


class OfWeight(JaxLossKeywords[Flag], Generic[Flag], total=False):
    """The keywords of both functions here."""

    strategy: Strategy
    backend: Backend
    weight_layout: WeightLayout


class JaxHeadKeywords(OfWeight[Flag], Generic[Flag], total=False):
    """The keywords of `linear_cross_entropy`."""

    axis_name: str | None


class Spreading(OfWeight[Flag], Generic[Flag], total=False):
    """The keywords of `sharded_linear_cross_entropy`."""

    mesh: Mesh | AbstractMesh | None
    vocab_axis: Required[str]
    token_axes: TokenAxes


@overload
def linear_cross_entropy(
    hidden: Array, weight: Array, target: Target = None, bias: Bias = None, **options: Unpack[JaxHeadKeywords[No]]
) -> jax.Array: ...
@overload
def linear_cross_entropy(
    hidden: Array, weight: Array, target: Target = None, bias: Bias = None, **options: Unpack[JaxHeadKeywords[Yes]]
) -> WithStats: ...
@overload
def linear_cross_entropy(
    hidden: Array, weight: Array, target: Target = None, bias: Bias = None, **options: Unpack[JaxHeadKeywords[bool]]
) -> jax.Array | WithStats: ...
@by_torch("onchip.ops.linear_cross_entropy.torch_op:linear_cross_entropy", "hidden", "weight", "bias")
def linear_cross_entropy(
    hidden: Array,  # [..., H]
    weight: Array,  # [V, H], or [H, V] with weight_layout="hv"
    target: Target = None,  # [...], or probabilities
    bias: Array | None = None,  # [V]
    *,
    labels: Target = None,  # another name for target
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
    whatever the inputs' dtype.  It works under jit, grad, vmap, scan and `jax.checkpoint`.  If arrays are sharded, each
    device computes its own tokens and its own entries of the vocabulary.

    Args:
        hidden: [..., H] float32, bfloat16, float16 or float64, T tokens in the leading dimensions.  NumPy's float64
            counts as float32 where JAX's 64-bit mode is off.
        weight: [V, H], or [H, V] with weight_layout="hv" (never transposed in memory), of hidden's dtype.  If one of
            them is float32 and the other has 16 bits, the products take 16-bit operands, and each gradient has its
            array's dtype.
        target: [...] of any integer dtype: the vocabulary index of each token, or `ignore_index`.  Or soft labels q,
            for which the loss has sum(q * (lse - z)) in place of lse - z[target]: the probabilities of all entries,
            floating point [..., V], or those of K entries, `TopK(indices, values, kind, rest="truncated")` of
            [..., K] with kind "probs" or "log_probs".  q need not sum to 1 and is a constant to autodiff.  All tokens
            count then, and there is no ignore_index and no strategy="stash".
        labels: another name for target, by keyword.
        bias: [V] of hidden's dtype or weight's.  Without softcap -inf takes an entry out of the vocabulary.
        weight_layout: "vh" or "hv".
        axis_name: inside `jax.shard_map`, the mesh axis over which the vocabulary is split.  weight and bias are then
            this device's [V / n, H] (or [H, V / n]) and [V / n], in the order of the devices.  Everything else,
            including the results, is the same on all devices of that axis.  Tokens may be split over another axis.
        vocab_size: with axis_name, the number of entries on all devices without padding.  Padding comes last and may
            hold any finite numbers.  class_weight is [vocab_size].
        shift: if True, position i of each sequence [..., S] predicts label i + 1, and the last one costs nothing, as in
            `onchip.torch`.  With soft labels, they and hidden are copied for it.  Inside `jax.shard_map` each device
            must hold whole sequences.
        ignore_index: tokens with this target add no loss, and their gradients are exactly 0, whatever values their
            hidden states hold.
        reduction: "mean", "sum" or "none" (the loss then has target's shape).
        normalizer: above 0: what "mean" divides by instead of the token count, as in `onchip.torch`.
        token_weight: [...] factor of each token's loss.  It doesn't change what "mean" divides by.
        class_weight: [V] float32 or of weight's dtype, 0 or more: factors w of the classes.  w[target] multiplies
            lse - z[target], w[v] each lse - z[v] that label smoothing adds; z-loss has no factor.  "mean" then divides
            by the sum of w[target] over tokens that are not ignored (by 1 if that is 0), unless there is a normalizer.
            With soft labels w multiplies each entry's probability, and "mean" divides by the number of tokens.
        label_smoothing: in [0, 1]: how much of the target's probability is spread evenly over the vocabulary.
        z_loss: 0 or more: factor of lse**2, which keeps logits from drifting.
        softcap: above 0, or None: squashes the logits smoothly into (-softcap, softcap).
        logit_scale: above 0: multiplies the logits before softcap.
        temperature: above 0: divides the logits after softcap; may also be a [...] array with one per token.
        scratch_bytes: bound on the temporary memory, not counting gradients in their parameters' dtypes: bytes, a text
            like "1GiB" or "300 MiB", or a float in (0, 1], that part of the float32 logits (4 * T * V bytes).  Default:
            256 MiB or an eighth of the float32 logits, for "mosaic_gpu" a fifth, whichever is more, and at least what
            one chunk needs; without gradients 64 MiB for "mosaic_gpu".
        strategy: "stash" does 3 matrix products.  "xla" then computes gradients in forward, chunk by chunk of tokens,
            in float32, and scales them in backward; so does "mosaic_gpu" for a frozen weight and for many tokens.
            Otherwise "mosaic_gpu" keeps the exponentials of up to H tokens in the memory of the weight's gradient and
            those of more tokens in scratch memory while it lasts; it computes the logits of the rest again.
            "recompute" computes logits again in backward, chunk by chunk of the vocabulary: 4 products, less memory.
            "auto" is the fastest that fits scratch_bytes.  With "xla" and reduction="none", gradients of weight and
            bias always take "recompute".
        backend: "mosaic_gpu" (kernels for Hopper, bfloat16 and float16), "xla" (plain JAX, on any device), "triton"
            (PyTorch's kernels, for NVIDIA GPUs of compute capability 8.0 or later, with `onchip[jax-triton]`), or
            "auto": "mosaic_gpu" on Hopper, "triton" on other GPUs, if they can run the call, and otherwise "xla".
        check_inputs: check values on a GPU too, and raise for wrong labels, temperatures, class weights and numbers.
            This waits for the device.  On a CPU, and in NumPy arrays, values are always checked.  Under jit that is
            impossible, and check_inputs=True raises.
        return_stats: also return per-token statistics (`LinearCrossEntropyStats`), without gradients.  For an lse with
            a gradient use `linear_log_probs`.

    The numbers normalizer, label_smoothing, z_loss, softcap, logit_scale and temperature may be 0-d arrays, traced or
    not.  A new value then doesn't compile anything again, but a traced one isn't checked.  They, token_weight and
    class_weight are constants to autodiff.

    Returns:
        The loss in float32 (float64 for float64 inputs), 0-d or of target's shape; with return_stats `(loss,
        LinearCrossEntropyStats)`.  If every token is ignored, "mean" is 0 with zero gradients.  Under jit, or on a
        GPU without check_inputs, a target that is neither ignore_index nor in [0, V), or a log-probability above 0,
        makes its token's loss, and the gradients that it enters, NaN.

    Raises:
        TypeError: an argument has the wrong type or dtype, or the call is differentiated in forward mode.
        ValueError: a shape, range or option is wrong; scratch_bytes is too small (the message says what suffices); or a
            target is out of range, where values are known (see check_inputs; the message names it).
        NotImplementedError: the loss is differentiated twice.

    Memory: `onchip plan --framework jax` prints it; `scratch_parts` of `onchip.vocab.xla.memory` ("xla") and
    `onchip.vocab.mosaic.memory` ("mosaic_gpu") are the formulas for a jitted step.  In float32 it is about
    4 * token_chunk * vocab_chunk bytes for "recompute", and 4 * (chunk * V + V * H + T * H) for "stash".  If a call is
    spread over devices, memory and scratch_bytes are those of one device, for its own tokens and entries.  Under vmap
    each array gets the mapped dimension, so pass a batch as leading dimensions where you can.

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
    return _call(OP, locals())


@overload
def sharded_linear_cross_entropy(
    hidden: Array, weight: Array, target: Target = None, bias: Bias = None, **options: Unpack[Spreading[No]]
) -> jax.Array: ...
@overload
def sharded_linear_cross_entropy(
    hidden: Array, weight: Array, target: Target = None, bias: Bias = None, **options: Unpack[Spreading[Yes]]
) -> WithStats: ...
@overload
def sharded_linear_cross_entropy(
    hidden: Array, weight: Array, target: Target = None, bias: Bias = None, **options: Unpack[Spreading[bool]]
) -> jax.Array | WithStats: ...
def sharded_linear_cross_entropy(
    hidden: Array,  # [..., H]
    weight: Array,  # [V, H], or [H, V] with weight_layout="hv"
    target: Target = None,  # [...]
    bias: Array | None = None,  # [V]
    *,
    vocab_axis: str,
    token_axes: TokenAxes = (),
    mesh: Mesh | AbstractMesh | None = None,
    labels: Target = None,  # another name for target
    weight_layout: WeightLayout = "vh",
    vocab_size: int | None = None,
    shift: bool = False,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    normalizer: Number | None = None,
    token_weight: Array | None = None,  # [...]
    class_weight: Array | None = None,  # [vocab_size]
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
    r"""`linear_cross_entropy` with the vocabulary split over the devices of a mesh axis, none of which has the whole
    weight.

    The loss and its gradients are those of::

        linear_cross_entropy(hidden, weight[:vocab_size], target, bias[:vocab_size], ...)

    Pass the whole arrays: the call makes its own `jax.shard_map`.  Each device computes the statistics of its tokens
    over its entries of the vocabulary.  A few float32 numbers per token are gathered along `vocab_axis`, once, and
    merged in a fixed order.  Then each device computes its part of the weight's gradient, and hidden's gradient is
    summed over the devices in float32.  It works under jit, grad, scan and `jax.checkpoint`, with meshes of
    `AxisType.Auto` and `AxisType.Explicit`.

    Args:
        hidden: [..., H], T tokens in the leading dimensions, which may be split over `token_axes`; the same on all
            devices along `vocab_axis`.
        weight: [V, H], or [H, V] with weight_layout="hv", split over `vocab_axis` along V: V is a multiple of the
            number of its devices.
        target, labels: as in `linear_cross_entropy`.  Probabilities of all entries [..., V] are split over `vocab_axis`
            along V, and those of padding don't count.
        bias: [V], split like the weight.
        vocab_axis: the mesh axis of the vocabulary.
        token_axes: the mesh axes of the leading dimensions, as in a `jax.sharding.PartitionSpec`: a name, or for each
            dimension a name, a tuple of names or None.  The mean is over the tokens of all devices, and weight's
            gradient is summed over these.
        mesh: a `jax.sharding.Mesh`; by default that of `jax.set_mesh`.
        vocab_size: how many entries count.  Those after them are padding and may hold any finite numbers.  Default: V.
        shift: as in `linear_cross_entropy`; token_axes must then not split the sequences.
        class_weight: [vocab_size], the same on all devices.
        scratch_bytes: bound on each device's temporary memory.
        strategy: as in `linear_cross_entropy`, except that only "mosaic_gpu" has "stash": "xla" would need the softmax
            over the whole vocabulary at once.
        backend: "mosaic_gpu", "xla" or "auto", as in `linear_cross_entropy`; the sizes of a device's part decide.  With
            padding the kernels take neither softcap nor label_smoothing.
        weight_layout, ignore_index, reduction, normalizer, token_weight: as in `linear_cross_entropy`.
        label_smoothing, z_loss, softcap, logit_scale, temperature, check_inputs, return_stats: likewise.

    Returns:
        The loss, as from `linear_cross_entropy`: 0-d and the same on all devices, or of target's shape and split like
        the tokens; with return_stats `(loss, LinearCrossEntropyStats)`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `linear_cross_entropy`.  Also if there is no mesh, it lacks one
            of the axes, V or the tokens can't be split evenly, or an array on an explicit mesh isn't split as said.

    Memory: on each device that of `linear_cross_entropy` for its tokens and its part of the vocabulary, and
    4 * T * K * (n + 2) bytes for what n devices gather, K (4 to 9) numbers per token.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.jax import sharded_linear_cross_entropy
        >>> hidden = jax.random.normal(jax.random.key(0), (2, 8, 16))
        >>> weight = jax.random.normal(jax.random.key(1), (100, 16))
        >>> target = jnp.arange(16).reshape(2, 8)
        >>> mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> def loss(hidden, weight):
        ...     return sharded_linear_cross_entropy(hidden, weight, target, vocab_axis="model", mesh=mesh)
        >>> jax.jit(jax.grad(loss, argnums=1))(hidden, weight).shape
        (100, 16)

    Sources: Megatron-LM (arXiv:1909.08053), for sharding the vocabulary; Milakov and Gimelshein (arXiv:1805.02867), for
    merging softmaxes.
    """
    return _call(ON_MESH, locals())


def _call(op: str, given: dict[str, Any]) -> jax.Array | WithStats:
    """The result of the public function of this name for these arguments."""
    name, _ = take_target(OP, given)
    layout, on_mesh = given["weight_layout"], op == ON_MESH
    check_layout(OP, layout)
    axis = None if on_mesh else given["axis_name"]
    if not on_mesh:
        parallel.check_axis(OP, axis, given["vocab_size"])
    soft = check_labels(OP, given, name, "hidden")
    hidden, leading, total = given["hidden"], given["hidden"].shape[:-1], accumulator(dtype_of(given["hidden"]))
    layer = XlaProjection.of(hidden, given["weight"], given["bias"], layout)
    tokens = hidden.size // hidden.shape[-1]
    options: LinearCrossEntropyOptions = options_of(OP, LinearCrossEntropyOptions, given, tokens * layer.vocab)
    what = "hidden of shape [..., S, H]" if soft else f"{name} of shape [..., S]"
    check_shift(OP, options.shift, leading, what)
    if soft:
        topk.refuse_options(OP, options)
        if options.strategy == "stash":
            raise ValueError(f"{OP}: soft labels are computed by strategy 'recompute'; got 'stash'; pass 'auto'")
    check_normalizer(OP, given["normalizer"], options.reduction)
    numbers = checked_numbers(OP, options, given, total)
    shard: Shard | None
    if on_mesh:
        spread, shard = parallel.on_mesh(ON_MESH, given, layer, name if not soft else "hidden", leading)
        # scratch_bytes as a fraction is a part of one device's logits.
        options = options_of(OP, LinearCrossEntropyOptions, given, tokens * layer.vocab // spread.parts)
        if options.shift and spread.leading[len(leading) - 1 :] not in ((), (None,)):
            raise ValueError(
                f"{ON_MESH}: shift=True needs whole sequences on each device, but token_axes split them along "
                f"{spread.leading[-1]!r}; shift {name} yourself and leave out shift"
            )
    else:
        shard = parallel.shard_of(OP, given, layer.vocab)
    vocab = layer.vocab if shard is None else shard.vocab
    class_weight = given["class_weight"]
    check_class_weight(OP, shapes_of({} if class_weight is None else {"class_weight": class_weight}), vocab)
    if soft and options.shift:
        given = without_ends(given, name)
        layer = replace(layer, hidden=unsplit(layer.hidden, -2)[..., :-1, :])
    constants = Given.of(OP, given, name, vocab, options, numbers, total)
    constants = constants.shifted() if options.shift and not soft else constants
    static = Static(options, platform(), given["backend"], shard)
    shape = layer.hidden.shape[:-1]
    of_loss = BY_TOKEN if options.reduction == "none" else WHOLE
    roles = Roles(parallel.roles_of(layer), constants.roles(), XlaLossOutputs(of_loss, BY_TOKEN))  # type: ignore[arg-type]
    if not layer.hidden.size:
        made = XlaLossOutputs.of_nothing(options.reduction, options.return_stats, total)
    elif on_mesh:
        of_layer, of_constants = roles.parameters, roles.constants
        of_labels = of_constants.probs if constants.labels is None else BY_TOKEN
        named = {"hidden": BY_TOKEN, "weight": of_layer.weight, "bias": of_layer.bias, name: of_labels}
        check_types(ON_MESH, spread, given, named | dict.fromkeys(("token_weight", "temperature"), BY_TOKEN))
        made = _op.on_mesh(static._replace(mesh=OnMesh(spread, roles)), layer, constants)
    else:
        share = isinstance(given["scratch_bytes"], float)
        made = by_tokens(_op, static, roles, layer, constants, by_share=share, but=axis)
    found = made.shaped(shape)
    return with_the_last(found, leading[-1] - shape[-1]) if shape != leading else found


def _at_once(static: Static, needs: XlaProjection) -> bool:
    """Whether forward computes the gradients when the compiler spreads the call."""
    options: LinearCrossEntropyOptions = static.options
    return options.reduction != "none" and options.strategy != "recompute"


_op = jax_loss.cross_entropy(OP).operator(
    at_once=_at_once,
    resumable=lambda static: static._replace(options=replace(static.options, strategy="recompute")),
)
