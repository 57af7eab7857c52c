"""Calls whose arrays are spread over devices: each has its own tokens, and gradients of shared arrays are summed once.

Each half of a derivative rule, forward or backward, is spread as a whole, so no derivative is taken through the
spreading.  The code that computes a gradient also says over which devices it is summed, whatever JAX knows of the mesh;
kernels need not say over which axes their results vary; and loops are planned for the tokens of one device.

If types say how arrays are sharded (explicit axes), or the caller does, a half is a `jax.shard_map`, and what a device
keeps for backward stays there.  Under plain `jit` with automatic axes only the compiler knows, while it partitions;
there a half is a `custom_partitioning`.  The shapes of all its results must not depend on the devices, so only numbers
for each token, or the gradients themselves, pass from forward to backward.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding

from onchip.frontend.jax_call import callable_here, names_of, refused, vary_alike, with_gradients
from onchip.frontend.jax_inputs import platform
from onchip.frontend.jax_mesh import ALONE, OnMesh, P, Role, Roles, Split, Spread, split_by_compiler

PLATFORMS = ("cpu", "gpu")


class Between(NamedTuple):
    """What passes from forward to backward where the compiler partitions both."""

    at_once: Callable[[Any, Any], bool] = lambda static, needs: False
    """(static, needs): whether forward makes the gradients, for an upstream gradient of 1 of its only sum."""
    resumable: Callable[[Any], Any] = lambda static: static
    """(static): otherwise, the `static` for forward whose result `keep` takes."""
    keep: Callable[..., Any] = lambda static, saved, *given: None
    """(static, saved, parameters, constants): numbers by token, [T, ...], or None."""
    resume: Callable[..., Any] = lambda static, needs, kept, *given: None
    """(static, needs, kept, parameters, constants): what forward saved.  If `kept` is None, it runs forward again and
    returns what backward reads of it."""


_NOTHING = Between()


def with_gradients_on_mesh(
    op: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    on_device: Callable[..., Any],
    between: Between = _NOTHING,
) -> Any:
    """The function that `with_gradients` makes from these, for `by_tokens`.  Its attribute `on_mesh` is for calls whose
    `static.mesh` says how they are spread, and `partitioned` for calls that the compiler spreads.

    on_device(static, parameters, constants): the arguments of forward on a device, for a call with arrays [..., n].
    Outputs and gradients that forward and backward have for T tokens get the leading dimensions back.
    """

    def given_on_device(static: Any, spread: Spread, parameters: Any, constants: Any) -> Any:
        own = static._replace(mesh=static.mesh._replace(spread=spread))
        if own.mesh.by_share and own.options.scratch_bytes is not None:
            part = max(1, own.options.scratch_bytes // spread.parts)
            own = own._replace(options=replace(own.options, scratch_bytes=part))
        return on_device(own, parameters, constants)

    # ------------------------------------------------------------------------------------------- spread as mesh says

    def forward_on_mesh(static: Any, needs: Any, parameters: Any, constants: Any) -> tuple[Any, Any]:
        spread, roles, _ = static.mesh
        specs = _specs(spread, roles[:2], (parameters, constants))

        def run(parameters: Any, constants: Any) -> tuple[Any, Any]:
            own, *given = given_on_device(static, spread, parameters, constants)
            outputs, saved = forward(own, needs, *given)
            return _whole(spread, roles, parameters, outputs, roles.outputs), _Kept.of(saved, given)

        call = _mapped(spread, run, specs, (_specs(spread, roles.outputs), _own(spread)))
        outputs, kept = call(*_placed(spread, (parameters, constants), specs))
        return outputs, (parameters, constants, kept)

    def backward_on_mesh(static: Any, needs: Any, residuals: Any, cotangents: Any) -> Any:
        spread, roles, _ = static.mesh
        parameters, constants, kept = residuals
        of_parameters, of_constants = _specs(spread, roles[:2], (parameters, constants))
        typed = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(parameters)]
        wanted = [
            role.sum_spec(spread, spec, x.shape)
            for role, spec, x in zip(
                _roles(roles.parameters, parameters), typed, jax.tree.leaves(parameters), strict=True
            )
        ]

        def run(parameters: Any, constants: Any, kept: _Kept, cotangents: Any) -> Any:
            own, *given = given_on_device(static, spread, parameters, constants)
            made = backward(own, needs, kept.whole(given), _flat(roles, parameters, cotangents))
            return _summed(spread, roles, parameters, made, wanted)

        of_sums = [spec for spec, need in zip(wanted, jax.tree.leaves(needs), strict=True) if need]
        in_specs = (of_parameters, of_constants, _own(spread), _specs(spread, roles.outputs))
        placed = _placed(spread, (parameters, constants), (of_parameters, of_constants))
        sums = _mapped(spread, run, in_specs, of_sums)(*placed, kept, cotangents)
        own = [spec for spec, need in zip(typed, jax.tree.leaves(needs), strict=True) if need]
        return _gradients(needs, _placed(spread, sums, own))

    # ------------------------------------------------------------------------------------- spread as the compiler says

    def forward_in_parts(static: Any, needs: Any, parameters: Any, constants: Any) -> tuple[Any, Any]:
        needed = any(jax.tree.leaves(needs))
        # A gradient of float16 would vanish before the upstream one scales it.
        half = any(x.dtype == jnp.float16 for x in jax.tree.leaves(parameters))
        once = needed and not half and between.at_once(static, needs)
        static = static if once or not needed else between.resumable(static)
        roles = static.mesh.roles

        def run(
            static: Any, spread: Spread, wanted: list[P], of_outputs: list[P], parameters: Any, constants: Any
        ) -> _Made:
            own, *given = given_on_device(static, spread, parameters, constants)
            outputs, saved = forward(own, needs, *given)
            kept, sums = None, []
            if once:
                ones = jax.tree.map(lambda x: None if x.ndim else jnp.ones_like(x), outputs)
                sums = _summed(spread, roles, parameters, backward(own, needs, saved, ones), wanted)
            elif needed:
                kept = between.keep(own, saved, *given)
            outputs = _whole(spread, roles, parameters, outputs, roles.outputs, of_outputs)
            return _Made(outputs, kept if kept is None else _whole(spread, roles, parameters, kept, roles.kept), sums)

        given = parameters, constants
        made = _in_parts(op, static, run, given, roles[:2], needs if once else None)
        return made.outputs, (made.sums,) if once else (made.kept, *given)

    def backward_in_parts(static: Any, needs: Any, residuals: Any, cotangents: Any) -> Any:
        kept, *given = residuals
        if not given:
            (upstream,) = jax.tree.leaves(cotangents)
            # Not promote_types, which raises where jax_numpy_dtype_promotion is "strict".
            wider = [max(g.dtype, upstream.dtype, key=lambda dtype: dtype.itemsize) for g in kept]
            return _gradients(needs, [g.astype(x) * upstream.astype(x) for g, x in zip(kept, wider, strict=True)])
        static, roles = between.resumable(static), static.mesh.roles

        def run(
            static: Any, spread: Spread, wanted: list[P], _: Any, parameters: Any, constants: Any, *more: Any
        ) -> _Made:
            own, *given = given_on_device(static, spread, parameters, constants)
            kept, upstream = _flat(roles, parameters, more)
            saved = between.resume(own, needs, kept, *given)
            saved = forward(own, needs, *given)[1] if saved is None else saved
            made = backward(own, needs, saved, upstream)
            return _Made(None, None, _summed(spread, roles, parameters, made, wanted))

        of_given = *roles[:2], None if kept is None else roles.kept, roles.outputs
        made = _in_parts(op, static, run, (*given, kept, cotangents), of_given, needs)
        return _gradients(needs, made.sums)

    call = with_gradients(op, forward, backward)
    call.on_device = on_device
    call.on_mesh = with_gradients(op, forward_on_mesh, backward_on_mesh)
    call.partitioned = with_gradients(op, forward_in_parts, backward_in_parts)
    return call


def by_tokens(
    call: Any,
    static: Any,
    roles: Roles,
    parameters: Any,
    constants: Any,
    *,
    by_share: bool = False,
    but: Any = None,
    plain: bool = False,
) -> Any:
    """The result of a function that `with_gradients_on_mesh` made, for arrays [..., n]; each device computes the tokens
    and the entries of the vocabulary that it has.

    Inside of a `jax.shard_map` a device computes all that it is given; `but` as in `vary_alike`.  Outputs by token may
    have one dimension for all tokens.  by_share: as in `OnMesh`.  plain: the compiler spreads the call well by itself.
    """
    given = parameters, constants
    if _dimensions(roles, parameters) and not jax.sharding.get_abstract_mesh().manual_axes:
        spread = _typed(roles, *given)
        if spread is not None:
            return call.on_mesh(static._replace(mesh=OnMesh(spread, roles, by_share)), *given)
        if jax.device_count() > 1 and not plain:
            return call.partitioned(static._replace(mesh=OnMesh(ALONE, roles, by_share)), *given)
    own, *of_device = call.on_device(static, *vary_alike(given, but=but))
    return callable_here(call)(own, *of_device)


# -------------------------------------------------------------------------------------------------- trees of arrays


def _roles(roles: Any, arrays: Any) -> list[Role]:
    """The role of each leaf."""
    return jax.tree.leaves(jax.tree.broadcast(roles, arrays))


def _specs(spread: Spread, roles: Any, arrays: Any = None) -> Any:
    """The `PartitionSpec`s of a tree of arrays; without arrays those of outputs, whatever dimensions they have."""
    if arrays is None:
        return jax.tree.map(lambda role: role.spec(spread), roles)
    found = [role.spec(spread, x.ndim) for role, x in zip(_roles(roles, arrays), jax.tree.leaves(arrays), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(arrays), found)


def _dimensions(roles: Roles, parameters: Any) -> int:
    """How many dimensions the tokens have."""
    return jax.tree.leaves(parameters)[0].ndim - 1 if roles.dimensions is None else roles.dimensions


def _whole(
    spread: Spread, roles: Roles, parameters: Any, made: Any, of_made: Any, wanted: Sequence[P] | None = None
) -> Any:
    """A tree of a device's results: those by token with all dimensions of the tokens, the others summed over the tokens
    of all devices.  Of a sum each device has its part by the `wanted` specs, one for each leaf.
    """
    leaves, tree = jax.tree.flatten(made)
    each = _roles(of_made, made)
    if roles.dimensions is None:
        leading = jax.tree.leaves(parameters)[0].shape[:-1]
        leaves = [x.reshape(*leading, *x.shape[1:]) if x.ndim else x for x in leaves]
    return jax.tree.unflatten(tree, _over_tokens(spread, leaves, each, wanted or [P()] * len(leaves)))


def _flat(roles: Roles, parameters: Any, made: Any) -> Any:
    """The reverse of `_whole`, for a device's tokens."""
    if roles.dimensions is not None:
        return made
    dimensions = _dimensions(roles, parameters)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[dimensions:]) if x.ndim else x, made)


def _summed(spread: Spread, roles: Roles, parameters: Any, made: Any, wanted: Sequence[P]) -> list[jax.Array]:
    """The gradients that aren't None, by token or summed over the tokens of all devices.  Each device has its part by
    the `wanted` specs, one for each parameter.
    """
    leaves, tree = jax.tree.flatten(parameters)
    gradients: list[Any] = tree.flatten_up_to(made)  # type: ignore[attr-defined]
    each = zip(leaves, gradients, _roles(roles.parameters, parameters), wanted, strict=True)
    given = [(x, g, role, spec) for x, g, role, spec in each if g is not None]
    like, there, of_there, specs = zip(*given, strict=True)
    sums = _over_tokens(spread, [g.reshape(x.shape) for x, g in zip(like, there, strict=True)], of_there, specs)
    return [g.astype(x.dtype) for x, g in zip(like, sums, strict=True)]


def _over_tokens(
    spread: Spread, arrays: Sequence[jax.Array], roles: Sequence[Role], wanted: Sequence[P]
) -> list[jax.Array]:
    """The arrays; those that aren't by token are summed over the tokens of all devices."""
    made: list[jax.Array] = []
    left: list[tuple[str, ...]] = []
    for x, role, spec in zip(arrays, roles, wanted, strict=True):
        names = () if role.by_token else spread.tokens
        for dimension, scattered in role.scattered(spread, spec) if names else ():
            x = lax.psum_scatter(x, scattered, scatter_dimension=dimension, tiled=True)
            names = tuple(name for name in names if name not in scattered)
        made.append(x)
        left.append(names)
    # All arrays with the same axes are summed together.
    for names in dict.fromkeys(filter(None, left)):
        mine = [i for i, other in enumerate(left) if other == names]
        for i, x in zip(mine, lax.psum([made[i] for i in mine], names), strict=True):
            made[i] = x
    return made


def _gradients(needs: Any, sums: Sequence[Any]) -> Any:
    """A tree like the parameters, with None where none is needed."""
    each = iter(sums)
    return jax.tree.map(lambda need: next(each) if need else None, needs)


# --------------------------------------------------------------------------------------------------- how it is spread


def _found(
    mesh: Any,
    dimensions: int,
    roles: Sequence[Role],
    shapes: Sequence[tuple[int, ...]],
    specs: Sequence[Any],
    more: Sequence[str] = (),
) -> Spread:
    """How to spread arrays with these specs evenly over a mesh: tokens as the first array that is split, and the
    vocabulary over axes that split no tokens.  `more` axes split tokens, any that can, if they split nothing else.
    """
    taken: list[str] = []
    given = list(zip(roles, shapes, specs, strict=True))

    def common(of: Callable[[Role], int | None]) -> int:
        """What the size of a dimension is a multiple of in all arrays."""
        return math.gcd(*(shape[at] for role, shape, _ in given if shape and (at := of(role)) is not None))

    def first(of: Callable[[Role], int | None], signs: Callable[[Role], int | None]) -> tuple[str, ...]:
        """The axes that split a dimension, taken from the first array whose spec tells."""
        size = common(of)
        for role, shape, spec in given:
            at = signs(role)
            names: list[str] = []
            for name in () if at is None or not shape else names_of((*spec, *[None] * (len(shape) - len(spec)))[at]):
                devices = math.prod(mesh.shape[x] for x in (*names, name))
                if name not in taken and size % devices == 0:
                    names.append(name)
            if names:
                taken.extend(names)
                return tuple(names)
        return ()

    leading: list[Any] = []
    along = [partial(lambda i, role: i if role.by_token else None, i) for i in range(dimensions)]
    for i, of in enumerate(along):
        signs = partial(lambda i, role: i if role.by_token or (role.rows and i == 0) else None, i)
        leading.append(first(of, signs) or None)
    vocab = first(lambda role: role.vocab, lambda role: role.vocab)
    for name in more:
        for i, of in enumerate(along):
            names = (*names_of(leading[i]), name)
            if name not in taken and common(of) % math.prod(mesh.shape[x] for x in names) == 0:
                leading[i] = names
                taken.append(name)
    return Spread(mesh, vocab[0] if len(vocab) == 1 else vocab or None, tuple(leading))


def _warn_of_the_rest(
    op: str,
    spread: Spread,
    dimensions: int,
    roles: Sequence[Role],
    shapes: Sequence[tuple[int, ...]],
    specs: Sequence[Any],
) -> None:
    """Warn of axes that split tokens or the vocabulary, and could split nothing evenly."""
    used = {*spread.tokens, *names_of(spread.vocab)}
    for role, shape, spec in zip(roles, shapes, specs, strict=True):
        own = {*range(dimensions if role.by_token else 0)} | (
            {role.vocab % len(shape)} if role.vocab is not None else set()
        )
        for at in sorted(own & {*range(len(spec))}):
            rest = [name for name in names_of(spec[at]) if name not in used]
            if rest:
                warnings.warn(
                    f"{op}: {shape[at]} {'tokens' if at < dimensions and role.by_token else 'entries'} of an array "
                    f"{list(shape)} are sharded over mesh axes {rest}, whose devices can't share them evenly: each "
                    "computes them all.  Pad them, or give another dimension that these devices can share",
                    stacklevel=2,
                )
                return


def _typed(roles: Roles, parameters: Any, constants: Any) -> Spread | None:
    """How arrays are spread according to their types, or None if these say nothing."""
    given = parameters, constants
    leaves = jax.tree.leaves(given)
    shardings: list[Any] = [jax.typeof(x).sharding for x in leaves]
    split = [s for s in shardings if any(entry is not None for entry in s.spec)]
    if not split:
        return None
    shapes, specs = [x.shape for x in leaves], [s.spec for s in shardings]
    return _found(split[0].mesh, _dimensions(roles, parameters), _roles(roles[:2], given), shapes, specs)


# ------------------------------------------------------------------------------------------------- by jax.shard_map


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["tree", "places"])
@dataclass(frozen=True)
class _Kept:
    """A tree of arrays, without those that backward is given anyway."""

    arrays: list[Any]
    tree: Any
    places: tuple[int | None, ...]
    """For each leaf its number among the given arrays, or None."""

    @staticmethod
    def of(saved: Any, given: Any) -> "_Kept":
        leaves, tree = jax.tree.flatten(saved)
        known = {id(x): i for i, x in enumerate(jax.tree.leaves(given))}
        places = tuple(known.get(id(x)) for x in leaves)
        # An array that each device has for itself gets a first dimension for the devices.
        return _Kept([x[None] for x, place in zip(leaves, places, strict=True) if place is None], tree, places)

    def whole(self, given: Any) -> Any:
        kept, known = iter(self.arrays), jax.tree.leaves(given)
        leaves = [next(kept)[0] if place is None else known[place] for place in self.places]
        return jax.tree.unflatten(self.tree, leaves)


def _mapped(spread: Spread, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    # `check_vma` isn't needed: no derivative is taken of this.
    return jax.shard_map(
        function, mesh=spread.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=spread.manual, check_vma=False
    )


def _own(spread: Spread) -> P:
    """Of what each device has for itself."""
    return P(tuple(name for name in spread.mesh.axis_names if name in spread.manual))


def _placed(spread: Spread, arrays: Any, specs: Any) -> Any:
    """The arrays where their specs say, if their types say that they are elsewhere."""
    if AxisType.Explicit not in spread.mesh.axis_types:
        return arrays

    def place(x: jax.Array, spec: P) -> jax.Array:
        wanted = (*spec, *[None] * (x.ndim - len(spec)))
        found = jax.typeof(x).sharding
        if tuple(map(names_of, found.spec)) == tuple(map(names_of, wanted)):
            return x
        return jax.sharding.reshard(x, NamedSharding(spread.mesh, P(*wanted)))  # type: ignore[no-any-return]

    return jax.tree.map(place, arrays, specs)


# ---------------------------------------------------------------------------------------------- by custom_partitioning


class _Made(NamedTuple):
    """The results of a half."""

    outputs: Any
    kept: Any  # by token
    sums: list[Any]  # the gradients that are needed


def _in_parts(
    op: str, static: Any, run: Callable[..., _Made], given: tuple[Any, ...], roles: tuple[Any, ...], needs: Any
) -> _Made:
    """run(static, spread, wanted, of_outputs, *given), spread as the compiler has the arrays.  `wanted` are the specs
    of the parameters' gradients, and `of_outputs` those of the outputs.  `needs` says which gradients it returns; None
    means none."""
    leaves, tree = jax.tree.flatten(given)
    of_leaves, count = _roles(roles, given), len(jax.tree.leaves(given[0]))
    needed = [] if needs is None else [i for i, need in enumerate(jax.tree.leaves(needs)) if need]
    dimensions, device = _dimensions(static.mesh.roles, given[0]), platform()
    made_of: list[Any] = []  # the tree of the results, and the role of each that is no gradient

    def flat(static: Any, spread: Spread, wanted: list[P], of_outputs: list[P], *leaves: Any) -> list[Any]:
        made = run(static, spread, wanted, of_outputs, *jax.tree.unflatten(tree, leaves))
        if not made_of:
            roles_of_outputs = [] if made.outputs is None else _roles(static.mesh.roles.outputs, made.outputs)
            of_kept = [] if made.kept is None else _roles(static.mesh.roles.kept, made.kept)
            made_of.extend((jax.tree.structure(made), roles_of_outputs + of_kept, len(roles_of_outputs)))
        assert jax.tree.structure(made) == made_of[0], "what passes between halves depends on the devices"
        return jax.tree.leaves(made)

    def alone(*leaves: Any) -> list[Any]:
        return flat(static, ALONE, [P()] * count, [], *leaves)

    def traced(*leaves: Any) -> list[Any]:
        """`alone`, but a budget that is too small for all tokens may do for those of a device."""
        try:
            return alone(*leaves)
        except ValueError as error:
            if getattr(static.options, "scratch_bytes", None) is None:
                raise
            unbounded = static._replace(options=replace(static.options, scratch_bytes=None))
            return [refused(x, str(error)) for x in flat(unbounded, ALONE, [P()] * count, [], *leaves)]

    def of_results() -> list[tuple[Role, int | None]]:
        """The role of each result, and for a gradient the number of its parameter."""
        return [*((role, None) for role in made_of[1]), *((of_leaves[i], i) for i in needed)]

    def rule(mesh: Any, operands: Any, results: Any) -> tuple[str, dict[str, int]]:
        """Which dimensions are split alike: tokens', the vocabulary's, and a gradient's and its parameter's; and
        tokens of which so many read, or are added to, a row are as the rows are."""
        of_made = [role for role, _ in of_results()]
        each = [*zip(of_leaves, operands, strict=True), *zip(of_made, results, strict=True)]
        tokens = [x.shape[0] for role, x in each if role.by_token]
        rows = [x.shape[0] for role, x in each if role.rows and x.shape[0] and tokens[0] % x.shape[0] == 0]
        of_rows = rows and {tokens[0]: f"r{tokens[0]}"}.get(rows[0], f"(r{rows[0]} q)")

        def letters(role: Role, own: str, shape: Any) -> str:
            names = [f"{own}{i}" for i in range(len(shape))]
            if role.by_token:
                names[:dimensions] = [of_rows] if of_rows else [f"t{i}" for i in range(dimensions)]
            if role.vocab is not None:
                names[role.vocab] = "v"
            if role.rows:
                names[0] = f"r{shape[0]}"
            return " ".join(names)

        taken = [letters(role, f"x{i}y", x.shape) for i, (role, x) in enumerate(zip(of_leaves, operands, strict=True))]
        made = [
            letters(role, f"z{k}y" if i is None else f"x{i}y", x.shape)
            for k, ((role, i), x) in enumerate(zip(of_results(), results, strict=True))
        ]
        sizes = {"q": tokens[0] // rows[0]} if of_rows and " " in of_rows else {}
        return f"{', '.join(taken)} -> {', '.join(made)}", sizes

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        split = None if mesh.empty else split_by_compiler(mesh, [*operands, *results])
        if split is None and not all(x.sharding.is_fully_replicated for x in operands):
            raise NotImplementedError(
                f"{op}: its arrays are sharded over several meshes, or not over a mesh with named axes; put them on "
                "one jax.sharding.Mesh, or call it inside jax.shard_map"
            )
        mesh, specs, parts = Split(mesh, [P()] * (len(operands) + len(results)), {}) if split is None else split
        of_operands, shapes = specs[: len(operands)], [x.shape for x in operands]
        # A device that has a part of any array has a part of the work.
        named = [name for spec in of_operands for entry in spec for name in names_of(entry)]
        more = dict.fromkeys(chain(named, *(parts[name] for name in named if name in parts)))
        spread = _found(mesh, dimensions, of_leaves, shapes, of_operands, tuple(more))
        _warn_of_the_rest(op, spread, dimensions, of_leaves, shapes, of_operands)
        if (spread.tokens or spread.vocab) and device not in PLATFORMS:
            raise NotImplementedError(
                f"{op}: arrays that are sharded under plain jit must be on CPU or GPU devices, not on "
                f"{device!r}; call it inside jax.shard_map"
            )
        wanted = [P()] * count
        of_made = []
        for (role, i), x, spec in zip(of_results(), results, specs[len(operands) :], strict=True):
            of_made.append(role.sum_spec(spread, spec, x.shape))
            if i is not None:
                wanted[i] = of_made[-1]
        of_given = [role.spec(spread, len(x.shape)) for role, x in zip(of_leaves, operands, strict=True)]
        in_shardings, out_shardings = (
            [NamedSharding(mesh, spec) for spec in specs] if not mesh.empty else [x.sharding for x in xs]
            for specs, xs in ((of_given, operands), (of_made, results))
        )
        return mesh, partial(flat, static, spread, wanted, of_made[: made_of[2]]), out_shardings, tuple(in_shardings)

    def shardings(mesh: Any, operands: Any, results: Any) -> Any:
        """What GSPMD asks for in place of the rule: how the results are split, gradients as their parameters."""
        asked = [None if i is None else operands[i].sharding for _, i in of_results()]
        try:
            each = zip(results, asked, strict=True)
            return partition(mesh, operands, [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in each])[2]
        except Exception:  # would end the process; partition raises it again
            return [NamedSharding(mesh, P())] * len(results)

    half = custom_partitioning(jax.jit(traced))
    half.def_partition(partition, infer_sharding_from_operands=shardings, decode_shardings=False, sharding_rule=rule)
    mapped = custom_vmap(lambda *leaves: half(*leaves))

    @mapped.def_vmap
    def as_one(size: int, batched: Sequence[bool], *leaves: Any) -> tuple[Any, Any]:
        made = jax.vmap(alone, [0 if x else None for x in batched])(*leaves)
        return made, [True] * len(made)

    made = mapped(*leaves)
    return jax.tree.unflatten(made_of[0], made)  # type: ignore[no-any-return]
