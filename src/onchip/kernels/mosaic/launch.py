"""Launches kernels in Pallas Mosaic GPU."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from onchip.frontend.jax_call import varies_over

Refs = Mapping[str, Any]
"""References to a kernel's inputs and outputs, by name."""


def launch(
    body: Callable[..., None],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    scratch: Sequence[Any],
    *,
    grid: Mapping[str, int],
    warpgroups: int | None,
    name: str,
    interpret: Any,
    cluster: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Run body(refs, *scratch) in each warpgroup of a grid, and return the outputs.

    inputs: arrays, or references to write to in place; those that are None are left out.
    outputs: shapes and dtypes.
    cluster: further axes, over programs that run side by side; None for programs of their own.
    warpgroups: of a program; None for a single one that has no axis, and may reduce a vector to a number.
    """
    inputs = {key: x for key, x in inputs.items() if x is not None}

    def kernel(*refs: Any) -> None:
        run = partial(body, dict(zip((*inputs, *outputs), refs, strict=True)))
        if scratch:
            axes = () if warpgroups is None else ("warpgroup",)
            pl.run_scoped(run, *scratch, collective_axes=axes)
        else:
            run()

    # Not plgpu.kernel, which takes no references from outside a kernel: those are worked on in place.
    mesh = plgpu.Mesh(
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        cluster=tuple((cluster or {}).values()),
        cluster_names=tuple(cluster or {}),
        num_threads=warpgroups,
        thread_name=None if warpgroups is None else "warpgroup",
        kernel_name=name,
    )
    parameters = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
    # Inside of a jax.shard_map with check_vma results must say that they vary over nothing, too.
    same = jax.sharding.ManualAxisType()
    out_type = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=same) for x in outputs.values())
    run = pl.kernel(
        kernel, out_type=out_type, mesh=mesh, compiler_params=parameters, interpret=interpret or False, name=name
    )

    def made_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(outputs, run(*inputs.values()), strict=True))

    axes = frozenset[str]().union(*map(varies_over, inputs.values()))
    return _untracked(made_of, inputs, outputs, axes) if axes else made_of(inputs)


def _untracked(
    run: Callable[[Mapping[str, Any]], dict[str, Any]],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    axes: frozenset[str],
) -> dict[str, Any]:
    """`run` inside of a `jax.shard_map` with check_vma: Pallas refuses references to arrays that vary over its axes."""
    references = {name: x for name, x in inputs.items() if isinstance(x, jax.Ref)}

    def hidden(state: Any, arrays: Any) -> Any:
        state, arrays = jax.tree.map(lambda x: lax.bitcast_convert_type(x, x.dtype), (state, arrays))
        empty = {name: lax.empty(x.shape, x.dtype) for name, x in outputs.items()}

        def on(refs: Any) -> None:
            mine, results = refs
            for name, x in run({name: mine.get(name, arrays.get(name)) for name in inputs}).items():
                results[name][...] = x

        return pl.run_state(on)((state, empty))

    here = jax.shard_map(hidden, in_specs=P(), out_specs=P(), axis_names=axes, check_vma=False)
    state = {name: x[...] for name, x in references.items()}
    made = here(state, {name: x for name, x in inputs.items() if name not in references})
    state, results = jax.tree.map(lambda x: lax.pcast(x, tuple(sorted(axes)), to="varying"), made)
    for name, x in state.items():
        references[name][...] = x
    found: dict[str, Any] = results
    return found


def written(kernel: Callable[..., Any], static: Mapping[str, Any], state: Any, *arrays: Any, **more: Any) -> Any:
    """What kernel(references, *arrays, **more, **static) leaves in the `state` that the references stand for.

    Tracing and lowering takes a few tenths of a second for a kernel, and is done once for all calls with the same
    function, options and shapes.  `static` must be hashable.
    """
    return _written(kernel, tuple(sorted(static.items())), state, arrays, more)


@partial(jax.jit, static_argnums=(0, 1))
def _written(kernel: Callable[..., Any], static: Any, state: Any, arrays: Any, more: Any) -> Any:
    return pl.run_state(lambda refs: kernel(refs, *arrays, **more, **dict(static)))(state)


def in_place(kernel: Callable[..., Any], static: Mapping[str, Any], refs: Any, *arrays: Any, **more: Any) -> None:
    """As `written`, for references."""
    state = written(kernel, static, jax.tree.map(lambda ref: ref[...], refs), *arrays, **more)
    jax.tree.map(lambda ref, x: ref.__setitem__(..., x), refs, state)


def multiprocessors() -> int:
    """The number of multiprocessors of the device that the kernel will run on; if it is only lowered, an H100's."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else 132
