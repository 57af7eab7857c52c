"""A vocabulary that is split over the devices of a mesh axis: each has its own entries of the weight.

The engine's two halves run on a device's entries alone, as if they were all.  Between the halves, the devices exchange
a few numbers per token in one all-gather.  `Shard.joined` makes the softmax of all entries from those of the shards, in
the order of the devices, so that all have the same bits.  hidden's gradient is the sum over the devices.

Inside of `jax.shard_map` with `check_vma=True`, JAX knows which mesh axes an array varies over.  What comes out of a
loss then doesn't vary over the vocabulary's axis, nor does hidden, whose gradient is summed here once.  With
`check_vma=False` nobody knows whether a derivative is taken inside of the `shard_map`, with an upstream gradient of its
own on each device, or outside, where each device gets a part of it.  So no gradient would be right, and it is refused.

Sources: Megatron-LM (arXiv:1909.08053) for the vocabulary's shards; Milakov and Gimelshein (arXiv:1805.02867) for
softmaxes that are merged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend.jax_call import IGNORED, OUT_OF_RANGE, is_tracked, varies_over, vary_alike
from onchip.frontend.jax_inputs import is_array
from onchip.frontend.jax_mesh import BY_TOKEN, Role, Spread, check_split, spread_of
from onchip.frontend.options import require_int
from onchip.frontend.topk import TopK
from onchip.vocab.xla.tiles import Softmax, XlaProjection

Array = jax.Array
# An index goes with the other numbers of its token, as a float32.
_MOST_ENTRIES = 2**24
# The arguments of which each device has a part.
_SPLIT = (
    "weight",
    "bias",
    "student_weight",
    "student_bias",
    "teacher_weight",
    "teacher_bias",
    "student_logits",
    "teacher_logits",
    "logits",
)
_LABELS = ("target", "labels")


@jax.tree_util.register_static
@dataclass(frozen=True)
class Shard:
    """This device's part of a vocabulary that is split evenly, in order, over a mesh axis, or a tuple of several; it
    holds no array."""

    axis: Any
    size: int
    """How many entries each device has."""
    vocab: int
    """How many entries count; those behind them are padding."""
    tracked: bool = True
    """Whether derivatives can be right: JAX knows what varies, or they are taken apart."""

    @staticmethod
    def of(
        op: str,
        axis: Any,
        vocab: Any,
        size: int,
        split: Mapping[str, Any],
        whole: Mapping[str, Any],
        name: str = "vocab_size",
    ) -> "Shard":
        """From a public function's arguments axis_name and, called `name`, vocab_size; raises for wrong ones.

        split, whole: the arrays of which each device has its own entries, and those that all devices have.
        """
        if not isinstance(axis, str):
            raise TypeError(f"{op}: axis_name must be the name of one mesh axis; got {type(axis).__name__}")
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if axis not in manual:
            raise ValueError(
                f"{op}: axis_name={axis!r} is not an axis of a jax.shard_map around the call ({list(manual)}); call it "
                f"inside of one{_or_instead(op, ', which makes its own')}"
            )
        tracked = is_tracked(axis)
        for name, x in split.items() if tracked else ():
            if axis not in varies_over(x):
                raise ValueError(
                    f"{op}: {name} is the same on all devices of axis {axis!r}, but axis_name says that each has its "
                    f"own entries of the vocabulary; put {axis!r} into its in_specs, or leave axis_name out"
                )
        for name, x in whole.items():
            if axis in varies_over(x):
                raise ValueError(
                    f"{op}: {name} varies over axis {axis!r}, but it must be the same on all devices that share a "
                    f"vocabulary; leave {axis!r} out of its in_specs, or gather it by "
                    f"jax.lax.all_gather(..., {axis!r}, to='invarying')"
                )
        return Shard(axis, size, whole_vocab(op, name, vocab, size, lax.axis_size(axis)), tracked)

    def refuse_untracked(self, op: str, needs: Any) -> None:
        """Raise if a gradient is needed that can't be right."""
        if not self.tracked and any(jax.tree.leaves(needs)):
            raise ValueError(
                f"{op}: inside of jax.shard_map(..., check_vma=False) the scale of gradients along {self.axis!r} isn't "
                f"known; leave check_vma out{_or_instead(op, ' outside of shard_map')}"
            )

    # ---------------------------------------------------------------------------------------------- before the exchange

    @property
    def padded(self) -> bool:
        """Whether some entries of a device don't count."""
        return self.vocab != self.size * lax.axis_size(self.axis)

    @property
    def start(self) -> Array:
        """[] int32: the first of this device's entries."""
        return lax.axis_index(self.axis) * self.size

    @property
    def end(self) -> Array | None:
        """[] int32: how many of this device's entries count; None if no device has padding."""
        return jnp.clip(self.vocab - self.start, 0, self.size) if self.padded else None

    def local_ids(self, ids: Array) -> Array:
        """Ids [...] as this device's entries are numbered; those of other devices match none."""
        here = (ids >= self.start) & (ids < self.start + self.size)
        elsewhere = jnp.where(ids == OUT_OF_RANGE, OUT_OF_RANGE, IGNORED)
        return jnp.where(here, ids - self.start, elsewhere)

    def entries(self, x: Array) -> Array:
        """This device's part [size] of [vocab], with zeros for padding."""
        padded = jnp.pad(x, (0, self.size * lax.axis_size(self.axis) - len(x)))
        return lax.dynamic_slice_in_dim(padded, self.start, self.size)

    def local(self, call: Any) -> Any:
        """A `Call` for this device's entries alone."""
        weight = None if call.class_weight is None else self.entries(call.class_weight)
        return vary_alike(call._replace(ids=self.local_ids(call.ids), class_weight=weight))

    # ----------------------------------------------------------------------------------------------------- the exchange

    def gathered(self, x: Any) -> Any:
        """Gather a tree of [P] or [P, K] values of one float dtype, or indices; each gets a first dimension for the
        devices.
        """
        leaves, tree = jax.tree.flatten(x)
        dtype = next(leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))
        columns = [leaf.reshape(len(leaf), -1).astype(dtype) for leaf in leaves]
        to = "invarying" if is_tracked(self.axis) else "varying"
        every = lax.all_gather(jnp.concatenate(columns, 1), self.axis, to=to)
        parts, start = [], 0
        for leaf, column in zip(leaves, columns, strict=True):
            part = every[:, :, start : start + column.shape[1]]
            parts.append(part.reshape(-1, *leaf.shape).astype(leaf.dtype))
            start += column.shape[1]
        return jax.tree.unflatten(tree, parts)

    def of_all(self, softmax: Softmax) -> Softmax:
        """The softmax with an argmax that counts from the first of all entries; a device whose logits are all -inf has
        no largest.
        """
        return softmax if softmax.argmax is None else softmax._replace(argmax=softmax.argmax + self.start)

    def joined(self, softmax: Softmax) -> Softmax:
        """The softmax over all entries, from that over each device's; an id's logit is 0 on devices that don't have
        it.
        """
        return self.merged(self.gathered(self.of_all(softmax)))

    def merged(self, parts: Softmax) -> Softmax:
        """The softmax over all entries, from the `gathered` results of `of_all`."""
        dtype, argmax = parts.max.dtype, parts.argmax
        top = jnp.max(parts.max, 0)
        drop = parts.max - top[None]
        decay = jnp.exp(drop)
        offset_sum, weight, moment = parts.offset_sum, parts.weight, parts.moment
        squares, squares_below = parts.squares, parts.squares_below
        if offset_sum is not None:
            first = jnp.arange(len(drop)) * self.size
            entries = jnp.clip(self.vocab - first, 0, self.size).astype(dtype)[:, None] if weight is None else weight
            offset_sum = jnp.sum(jnp.where(entries > 0, offset_sum + drop * entries, 0), 0)
        if moment is not None:
            moment = jnp.sum(jnp.where(decay > 0, (moment + drop * parts.total) * decay, 0), 0)
        if squares is not None and squares_below is not None:
            squares_below = jnp.sum(jnp.where(drop < 0, squares, squares_below) * decay * decay, 0)
            squares = jnp.sum(squares * decay * decay, 0)
        if argmax is not None:
            best = jnp.argmax(parts.max, 0)[None]
            argmax = jnp.take_along_axis(argmax, best, 0)[0]
        return Softmax(
            max=top,
            total=jnp.sum(parts.total * decay, 0),
            below=jnp.sum(jnp.where(drop < 0, parts.total, parts.below) * decay, 0),
            picked=jnp.sum(parts.picked, 0),
            offset_sum=offset_sum,
            moment=moment,
            argmax=argmax,
            squares=squares,
            squares_below=squares_below,
            weight=None if weight is None else jnp.sum(weight, 0),
        )

    # --------------------------------------------------------------------------------------------------------- after it

    def summed(self, x: Array | None) -> Array | None:
        """The sum over the devices."""
        return None if x is None else lax.psum(x, self.axis)


def _or_instead(op: str, how: str) -> str:
    """The op that spreads itself over a mesh, if there is one, as a remedy in an error message."""
    return f", or call sharded_{op}{how}" if op.startswith("linear_") else ""


def check_axis(op: str, axis: Any, vocab: Any, padded: str = "weight and bias") -> None:
    """Raise if a function's arguments axis_name and vocab_size don't go together; `padded` are the arrays that have
    axis_name.
    """
    if axis is None and vocab is not None:
        raise ValueError(
            f"{op}: vocab_size={vocab} is for a vocabulary that is split over devices; pass axis_name too, or cut the "
            f"padding off {padded}"
        )


def shard_of(op: str, given: Mapping[str, Any], size: int, vocab: str = "vocab_size") -> Shard | None:
    """The shard for the arguments of a public function, on a device with so many entries; None without an axis_name.

    `vocab` is the argument that says how many entries count.
    """
    if given["axis_name"] is None:
        return None
    arrays = {name: x for name, x in given.items() if is_array(x)}
    # A device has its own part of soft labels for every entry, but all of a `TopK`.
    split = {
        name: x
        for name, x in arrays.items()
        if name in _SPLIT or (name in _LABELS and jnp.issubdtype(x.dtype, jnp.floating))
    }
    whole = {name: x for name, x in arrays.items() if name not in split}
    for name, x in given.items():
        if isinstance(x, TopK):
            whole |= {f"{name}.indices": x.indices, f"{name}.values": x.values}
    return Shard.of(op, given["axis_name"], given[vocab], size, split, whole, vocab)


def whole_vocab(op: str, name: str, vocab: Any, size: int, devices: int) -> int:
    """How many of all devices' entries count, `vocab` being the argument called `name` or None; raises for a wrong
    one.
    """
    if vocab is None:
        vocab = size * devices
    require_int(op, name, vocab)
    if not 1 <= vocab <= size * devices:
        raise ValueError(
            f"{op}: {name}={vocab} but {devices} devices have {size} entries each; it must be between 1 and "
            f"{size * devices}"
        )
    if size > _MOST_ENTRIES // devices:
        raise ValueError(f"{op}: a vocabulary that is split may have {_MOST_ENTRIES} entries; got {size * devices}")
    return int(vocab)


# ----------------------------------------------------------------------------------------- calls that spread themselves


def on_mesh(
    op: str, given: Mapping[str, Any], layer: XlaProjection, of: str, leading: tuple[int, ...]
) -> tuple[Spread, Shard]:
    """How a call is spread over a mesh, and each device's `Shard`; raises for wrong arguments `mesh`, `vocab_axis`,
    `token_axes` and `vocab_size`.  `leading` are the leading dimensions of the argument `of`.
    """
    spread = spread_of(op, given["mesh"], given["vocab_axis"], given["token_axes"], of, leading)
    size = check_split(op, "weight", layer.vocab, spread, "vocab_size")
    vocab = whole_vocab(op, "vocab_size", given["vocab_size"], size, spread.devices(spread.vocab))
    return spread, Shard(spread.vocab, size, vocab)


def roles_of(layer: XlaProjection) -> XlaProjection:
    """The dimensions of hidden [..., H], weight and bias that are tokens or vocabulary."""
    of_bias = None if layer.bias is None else Role(vocab=0)
    return XlaProjection(BY_TOKEN, Role(vocab=layer.vocab_axis), of_bias, layer.vocab_axis)


def split_as(static: Any, size: int) -> Any:
    """The `static` of a call on a device that has so many entries of the vocabulary, with its `Shard` if the call is
    spread over others.
    """
    spread = None if static.mesh is None else static.mesh.spread
    if spread is None or spread.vocab is None or static.shard is not None:
        return static
    return static._replace(shard=Shard(spread.vocab, size, size * spread.devices(spread.vocab)))
