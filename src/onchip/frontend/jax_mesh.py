"""JAX functions that spread a call over the devices of a mesh themselves, by a `jax.shard_map` around each half of
their derivative rule.

So no derivative is taken through a `shard_map`: what a device's gradient is, and what is summed over which devices, is
said where it is computed, whatever JAX knows of the mesh, and kernels need not say over which axes their results vary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from onchip.frontend.jax_call import is_tracked, with_gradients
from onchip.frontend.jax_inputs import is_array

TokenAxes = str | tuple[str | tuple[str, ...] | None, ...] | PartitionSpec
"""Mesh axes of the leading dimensions, as in a `jax.sharding.PartitionSpec`."""


P = PartitionSpec


class Spread(NamedTuple):
    """How a call is spread over a mesh; hashable."""

    mesh: Mesh | AbstractMesh
    vocab: str
    """The axis over which the vocabulary is split."""
    leading: tuple[Any, ...]
    """The axes of each leading dimension of what has one number, or row, for each token."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """All axes over which tokens are split."""
        return tuple(name for entry in self.leading for name in _names(entry))

    @property
    def by_token(self) -> P:
        """Of arrays [...] or [..., K]."""
        return P(*self.leading)

    def by_entry(self, dimensions: int) -> P:
        """Of arrays [..., V] with so many leading dimensions."""
        return P(*self.leading, *[None] * (dimensions - len(self.leading)), self.vocab)

    def of_weight(self, vocab_axis: int) -> P:
        """Of a matrix with the vocabulary along this dimension."""
        return P(None, self.vocab) if vocab_axis else P(self.vocab, None)

    def devices(self, names: Any) -> int:
        """Devices along some axes."""
        return prod(self.mesh.shape[name] for name in _names(names))

    @property
    def parts(self) -> int:
        """Of how many parts of the logits a device has one."""
        return self.devices((self.vocab, *self.tokens))

    @property
    def manual(self) -> frozenset[str]:
        """The axes of the `shard_map`: all that aren't those of one around it."""
        ambient = jax.sharding.get_abstract_mesh()
        return frozenset(self.mesh.axis_names) - frozenset(ambient.manual_axes)


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


# -------------------------------------------------------------------------------------------------------------- checks


def spread_of(op: str, mesh: Any, vocab_axis: Any, token_axes: Any, of: str, leading: tuple[int, ...]) -> Spread:
    """Of a public function's arguments; raise for wrong ones.  `leading` are the leading dimensions of the argument
    `of`."""
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(f"{op}: there is no mesh; pass mesh=, or call it under jax.set_mesh(...)")
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(f"{op}: mesh must be a jax.sharding.Mesh; got {type(mesh).__name__}")
    entries = (token_axes,) if isinstance(token_axes, str) else token_axes
    if not isinstance(entries, (tuple, P)) or not all(_is_entry(x) for x in entries):
        raise TypeError(
            f"{op}: token_axes must be the name of a mesh axis, or a tuple with a name, a tuple of names or None for "
            f"each leading dimension of {of}; got {token_axes!r}"
        )
    if not isinstance(vocab_axis, str):
        raise TypeError(f"{op}: vocab_axis must be the name of one mesh axis; got {type(vocab_axis).__name__}")
    if len(entries) > len(leading):
        raise ValueError(
            f"{op}: token_axes={token_axes!r} has an entry for each of {len(entries)} dimensions, but {of} has "
            f"{len(leading)} leading ones; several axes of one dimension are a tuple in the tuple: (('a', 'b'),)"
        )
    spread = Spread(mesh, vocab_axis, tuple(entries))
    manual = jax.sharding.get_abstract_mesh().manual_axes
    named = ("vocab_axis", vocab_axis), *(("token_axes", name) for name in spread.tokens)
    for argument, name in named:
        if name not in mesh.axis_names:
            raise ValueError(f"{op}: {argument} {name!r} is not an axis of the mesh, whose axes are {mesh.axis_names}")
        if name in manual:
            raise ValueError(
                f"{op}: {argument} {name!r} is an axis of a jax.shard_map around the call; inside of it call "
                f"{op.removeprefix('sharded_')} with axis_name"
            )
    if any(map(is_tracked, manual)):
        raise ValueError(
            f"{op}: inside of jax.shard_map the call can't say over which axes its results vary; call it outside, or "
            f"call {op.removeprefix('sharded_')} with axis_name inside of one over {vocab_axis!r} too"
        )
    if len({name for _, name in named}) < len(named):
        raise ValueError(
            f"{op}: an axis can split one dimension; got vocab_axis={vocab_axis!r}, token_axes={token_axes!r}"
        )
    for i, (size, entry) in enumerate(zip(leading, entries, strict=False)):
        if size % spread.devices(entry):
            raise ValueError(
                f"{op}: {of} has {size} at dimension {i}, which {spread.devices(entry)} devices along {entry!r} can't "
                "share evenly; pad the tokens, with targets of ignore_index"
            )
    return spread


def _is_entry(x: Any) -> bool:
    return x is None or isinstance(x, str) or (isinstance(x, tuple) and all(isinstance(y, str) for y in x))


def check_split(op: str, name: str, vocab: int, spread: Spread, remedy: str) -> int:
    """Raise unless the devices can share so many entries, of the argument `name`, evenly; return how many each has.

    `remedy` says which argument has the number without padding.
    """
    devices = spread.devices(spread.vocab)
    if vocab % devices:
        more = -(-vocab // devices) * devices
        raise ValueError(
            f"{op}: {name} has V={vocab}, which {devices} devices along {spread.vocab!r} can't share evenly; pad it to "
            f"{more} and pass {remedy}={vocab}"
        )
    return vocab // devices


def check_types(op: str, spread: Spread, given: Mapping[str, Any], specs: Mapping[str, P]) -> None:
    """Raise unless the arguments that have `specs`, where their types say how they are sharded, are sharded so.

    JAX would refuse these too, in other words; where types don't say it, the compiler moves what has to be moved.
    """
    if not all(kind == AxisType.Explicit for kind in spread.mesh.axis_types):
        return
    for name, spec in specs.items():
        x = given[name]
        if not is_array(x) or x.ndim == 0:
            continue
        found: Any = jax.typeof(x).sharding
        wanted = tuple(spec) + (None,) * (len(x.shape) - len(spec))
        if tuple(map(_names, found.spec)) == tuple(map(_names, wanted)):
            continue
        if found.mesh.empty:
            raise ValueError(
                f"{op}: {name} isn't on the mesh, whose axes are explicit; pass "
                f"jax.device_put({name}, jax.sharding.NamedSharding(mesh, {P(*wanted)}))"
            )
        raise ValueError(
            f"{op}: {name} is sharded as {found.spec}; it must be {P(*wanted)}: pass "
            f"jax.sharding.reshard({name}, {P(*wanted)})"
        )


# ----------------------------------------------------------------------------------------------------------- the calls


class OnMesh(NamedTuple):
    """What is known while tracing of how a call spreads itself."""

    spread: Spread
    specs: tuple[Any, Any, Any]
    """`PartitionSpec`s of parameters, each of which has one, and of constants and outputs, or of parts of their
    trees."""


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["tree", "places"])
@dataclass(frozen=True)
class _Kept:
    """A tree of arrays without those that a device is given in backward too."""

    arrays: list[Any]
    tree: Any
    places: tuple[int | None, ...]
    """Of each leaf: which of those that are given it is."""

    @staticmethod
    def of(saved: Any, given: Any) -> "_Kept":
        leaves, tree = jax.tree.flatten(saved)
        known = {id(x): i for i, x in enumerate(jax.tree.leaves(given))}
        places = tuple(known.get(id(x)) for x in leaves)
        # Of what each device has for itself the first dimension is for the devices.
        return _Kept([x[None] for x, place in zip(leaves, places, strict=True) if place is None], tree, places)

    def whole(self, given: Any) -> Any:
        kept, known = iter(self.arrays), jax.tree.leaves(given)
        leaves = [next(kept)[0] if place is None else known[place] for place in self.places]
        return jax.tree.unflatten(self.tree, leaves)


def with_gradients_on_mesh(
    op: str, forward: Callable[..., Any], backward: Callable[..., Any], on_device: Callable[..., Any]
) -> Any:
    """What `with_gradients` makes of these, with an attribute `on_mesh`: the same for calls that spread themselves, of
    which `static.mesh` says how.

    on_device(static, parameters, constants): of such a call, what forward takes on a device.  There the first leaf of
    the parameters is [..., H], and outputs and gradients that forward and backward have for T tokens get its leading
    dimensions.  Outputs that are one number, and gradients of parameters that all tokens have, are summed over them.
    """

    def forward_on_mesh(static: Any, needs: Any, parameters: Any, constants: Any) -> tuple[Any, Any]:
        spread, (of_parameters, of_constants, of_outputs) = static.mesh

        def run(parameters: Any, constants: Any) -> tuple[Any, Any]:
            own, *given = on_device(static, parameters, constants)
            outputs, saved = forward(own, needs, *given)
            leading = jax.tree.leaves(parameters)[0].shape[:-1]

            def whole(x: jax.Array) -> jax.Array:
                if x.ndim:
                    return x.reshape(*leading, *x.shape[1:])
                return jax.lax.psum(x, spread.tokens) if spread.tokens else x

            return jax.tree.map(whole, outputs), _Kept.of(saved, given)

        call = _mapped(spread, run, (of_parameters, of_constants), (of_outputs, _own(spread)))
        outputs, kept = call(parameters, constants)
        return outputs, (parameters, constants, kept)

    def backward_on_mesh(static: Any, needs: Any, residuals: Any, cotangents: Any) -> Any:
        spread, (of_parameters, of_constants, of_outputs) = static.mesh

        def run(parameters: Any, constants: Any, kept: _Kept, cotangents: Any) -> Any:
            own, *given = on_device(static, parameters, constants)
            leaves, tree = jax.tree.flatten(parameters)
            dimensions = leaves[0].ndim - 1
            upstream = jax.tree.map(lambda x: x.reshape(-1, *x.shape[dimensions:]) if x.ndim else x, cotangents)
            made = _up_to(tree, backward(own, needs, kept.whole(given), upstream))
            specs = _up_to(tree, of_parameters)
            alike = [not {*spread.tokens} <= _axes(spec) for spec in specs]
            sums = [g for g, same in zip(made, alike, strict=True) if same and g is not None]
            summed = iter(jax.lax.psum(sums, spread.tokens) if sums else ())
            whole = [
                g if g is None else next(summed) if same else g.astype(x.dtype).reshape(x.shape)
                for x, g, same in zip(leaves, made, alike, strict=True)
            ]
            return jax.tree.unflatten(tree, whole)

        call = _mapped(spread, run, (of_parameters, of_constants, _own(spread), of_outputs), of_parameters)
        return call(*residuals, cotangents)

    call = with_gradients(op, forward, backward)
    call.on_mesh = with_gradients(op, forward_on_mesh, backward_on_mesh)
    return call


def _mapped(spread: Spread, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    # Not by `check_vma`: no derivative is taken of this.
    return jax.shard_map(
        function, mesh=spread.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=spread.manual, check_vma=False
    )


def _own(spread: Spread) -> P:
    """Of what each device has for itself."""
    return P(tuple(name for name in spread.mesh.axis_names if name in spread.manual))


def _up_to(tree: Any, x: Any) -> list[Any]:
    """What another tree has where this one has leaves."""
    return tree.flatten_up_to(x)  # type: ignore[no-any-return]


def _axes(spec: P) -> set[str]:
    return {name for entry in spec for name in _names(entry)}
