"""How a call is spread over the devices of a mesh: which mesh axes split its tokens and its vocabulary, and which
dimensions of its arrays these are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from onchip.frontend.jax_call import is_tracked, names_of
from onchip.frontend.jax_inputs import is_array

TokenAxes = str | tuple[str | tuple[str, ...] | None, ...] | PartitionSpec
"""Mesh axes of the leading dimensions, as in a `jax.sharding.PartitionSpec`."""


P = PartitionSpec


class Spread(NamedTuple):
    """How a call is spread over a mesh; hashable."""

    mesh: Any
    """A `Mesh` or `AbstractMesh`; None where nothing is split."""
    vocab: Any
    """The axis over which the vocabulary is split, a tuple of several, or None."""
    leading: tuple[Any, ...]
    """The axes of each leading dimension of what has one number, or row, for each token."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """All axes over which tokens are split."""
        return tuple(name for entry in self.leading for name in names_of(entry))

    def devices(self, names: Any) -> int:
        """Devices along some axes."""
        return prod(self.mesh.shape[name] for name in names_of(names))

    @property
    def parts(self) -> int:
        """Of how many parts of the logits a device has one."""
        return self.devices((*names_of(self.vocab), *self.tokens))

    @property
    def manual(self) -> frozenset[str]:
        """The axes of the `shard_map`: all that aren't those of one around it."""
        ambient = jax.sharding.get_abstract_mesh()
        return frozenset(self.mesh.axis_names) - frozenset(ambient.manual_axes)


ALONE = Spread(None, None, ())
"""Over nothing."""


@dataclass(frozen=True)
class Role:
    """What an array of a call has of its tokens and its vocabulary."""

    by_token: bool = False
    """Its leading dimensions are the tokens'; else all tokens share it, and its gradient is summed over them."""
    vocab: int | None = None
    """The dimension along the vocabulary; in attention along the heads."""
    rows: bool = False
    """Its first dimension are rows that tokens read, or are added to: all tokens share it, and where there are no other
    signs they are split as it is."""

    def spec(self, spread: Spread, dimensions: int = 0) -> P:
        """Of an array with so many dimensions, or more."""
        entries: list[Any] = [None] * max(dimensions, 0 if self.vocab is None else self.vocab + 1)
        if self.by_token:
            entries[: len(spread.leading)] = spread.leading
        if self.vocab is not None:
            entries[self.vocab] = spread.vocab
        return P(*entries)

    def sum_spec(self, spread: Spread, asked: Any, shape: tuple[int, ...]) -> P:
        """Of the gradient of such an array of this shape: split too as is `asked` for, over devices that share tokens,
        where these can share it evenly."""
        entries = list(self.spec(spread, len(shape)))
        for i, entry in enumerate(() if self.by_token else asked[: len(shape)]):
            names = names_of(entry)
            if names and entries[i] is None and {*names} <= {*spread.tokens} and not shape[i] % spread.devices(names):
                entries[i] = names
        return P(*entries)

    def scattered(self, spread: Spread, spec: P) -> list[tuple[int, tuple[str, ...]]]:
        """The dimensions that `sum_spec` splits over devices that share tokens, and the axes of these."""
        own = self.spec(spread, len(spec)) if spec else spec
        return [(i, names_of(entry)) for i, entry in enumerate(spec) if entry != own[i]]


BY_TOKEN, BY_ENTRY, WHOLE = Role(True), Role(True, -1), Role()
"""[...] or [..., K]; [..., V]; and what all tokens share."""


class Roles(NamedTuple):
    """Of the arrays of a call: trees like these, or prefixes of them.  Outputs that aren't by token are sums over
    tokens."""

    parameters: Any
    constants: Any
    outputs: Any
    dimensions: int | None = None
    """So many are the tokens'.  None: all but the last of the first parameter, [..., H] or [..., V]; on a device they
    are one."""
    kept: Any = BY_TOKEN
    """Of what passes from forward to backward where the compiler spreads both."""


class OnMesh(NamedTuple):
    """What is known while tracing of how a call is spread."""

    spread: Spread
    roles: Roles
    by_share: bool = False
    """Whether the options' scratch_bytes are a part of the memory of all devices' logits."""


# ------------------------------------------------------------------------------------------ what the compiler has split


class Split(NamedTuple):
    """How the compiler has split arrays over devices."""

    mesh: Mesh
    """One where each axis is used as a whole: an axis that is split by the compiler is several here."""
    specs: list[P]
    """Of each array."""
    parts: dict[str, tuple[str, ...]]
    """For each axis that is a part of another, all parts of that."""


def split_by_compiler(mesh: Mesh, arrays: Sequence[Any]) -> Split | None:
    """Of arrays on the mesh, whose `sharding` and `ndim` are known; None if no mesh of these devices fits."""
    # Each axis as axes of prime sizes, the devices' numbers along each of these, and along the dimensions of arrays.
    fine = [(name, p) for name in mesh.axis_names for p in _primes(mesh.shape[name])]
    sizes = [p for _, p in fine]
    places = np.indices(sizes).reshape(len(sizes), -1)
    used: list[list[tuple[int, ...]]] = []
    for x in arrays:
        if x.sharding is None or x.sharding.is_fully_replicated:
            used.append([])
            continue
        slices = x.sharding.devices_indices_map((mesh.size,) * x.ndim)
        starts = np.array([[at.start or 0 for at in slices[device]] for device in mesh.devices.flat])
        used.append([])
        for start in starts.T:
            number = start * len({*start}) // mesh.size
            strides = [int(number.reshape(sizes)[tuple(row)]) for row in np.eye(len(sizes), dtype=int)]
            if (np.array(strides) @ places != number).any():
                return None
            used[-1].append(tuple(sorted((i for i, x in enumerate(strides) if x), key=lambda i: -strides[i])))
    # An axis is whole if it is used so, or not at all, everywhere.
    members = {name: tuple(i for i, (other, _) in enumerate(fine) if other == name) for name in mesh.axis_names}

    def whole(own: tuple[int, ...]) -> bool:
        touched = [entry for entries in used for entry in entries if {*own} & {*entry}]
        return all(own in (entry[i : i + len(own)] for i in range(len(entry))) for entry in touched)

    named: list[tuple[str, int, tuple[int, ...]]] = []
    for name, own in members.items():
        if whole(own):
            named.append((name, mesh.shape[name], own))
        else:
            named.extend((f"{name}.{k}", sizes[i], (i,)) for k, i in enumerate(own))
    first = {own[0]: name for name, _, own in named if own}
    specs = [P(*(tuple(first[i] for i in entry if i in first) or None for entry in entries)) for entries in used]
    made = Mesh(mesh.devices.reshape([size for _, size, _ in named]), [name for name, _, _ in named])
    parts: dict[str, tuple[str, ...]] = {}
    for name, own in members.items():
        if name not in made.axis_names:
            every = tuple(f"{name}.{k}" for k in range(len(own)))
            parts |= dict.fromkeys(every, every)
    return Split(made, specs, parts)


def _primes(number: int) -> list[int]:
    """Its prime factors, the least first."""
    made, factor = [], 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            made.append(factor)
            number //= factor
    return made


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
            f"{len(leading)} leading ones; write several axes for one dimension as a tuple in the tuple: (('a', 'b'),)"
        )
    spread = Spread(mesh, vocab_axis, tuple(entries))
    manual = jax.sharding.get_abstract_mesh().manual_axes
    named = ("vocab_axis", vocab_axis), *(("token_axes", name) for name in spread.tokens)
    for argument, name in named:
        if name not in mesh.axis_names:
            raise ValueError(f"{op}: {argument} {name!r} is not an axis of the mesh, whose axes are {mesh.axis_names}")
        if name in manual:
            raise ValueError(
                f"{op}: {argument} {name!r} is an axis of a jax.shard_map around the call; inside that call "
                f"{op.removeprefix('sharded_')} with axis_name"
            )
    if any(map(is_tracked, manual)):
        raise ValueError(
            f"{op}: inside jax.shard_map the call can't say over which axes its results vary; call it outside, or call "
            f"{op.removeprefix('sharded_')} with axis_name inside a jax.shard_map over {vocab_axis!r} too"
        )
    if len({name for _, name in named}) < len(named):
        raise ValueError(
            f"{op}: an axis can split only one dimension; got vocab_axis={vocab_axis!r}, token_axes={token_axes!r}"
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


def check_types(op: str, spread: Spread, given: Mapping[str, Any], roles: Mapping[str, Role | None]) -> None:
    """Raise unless the arguments that have `roles`, where their types say how they are sharded, are sharded so.

    JAX would refuse these too, in other words; where types don't say it, the compiler moves what has to be moved.
    """
    if not all(kind == AxisType.Explicit for kind in spread.mesh.axis_types):
        return
    for name, role in roles.items():
        x = given[name]
        if role is None or not is_array(x) or x.ndim == 0:
            continue
        found: Any = jax.typeof(x).sharding
        wanted = role.spec(spread, x.ndim)
        if tuple(map(names_of, found.spec)) == tuple(map(names_of, wanted)):
            continue
        if found.mesh.empty:
            raise ValueError(
                f"{op}: {name} isn't on the mesh, whose axes are explicit; pass "
                f"jax.device_put({name}, jax.sharding.NamedSharding(mesh, {wanted}))"
            )
        raise ValueError(
            f"{op}: {name} is sharded as {found.spec}; it must be {wanted}: pass jax.sharding.reshard({name}, {wanted})"
        )
