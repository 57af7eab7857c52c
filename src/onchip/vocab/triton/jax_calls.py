"""The Triton kernels of the vocabulary losses as functions of JAX arrays, through jax-triton.

jax-triton gives a kernel its inputs in order, then its outputs, and what is a constant by name; an output can be an
input's memory.  Kernels have their parameters in an order of their own, and take numbers where JAX may have traced
ones, in arrays.  So `call` writes an entry, a kernel that calls the other by its parameters' names: they may be
reordered, or get defaults, without a change here.  Sizes are constants: of numbers jax-triton doesn't say which are
multiples of 16, without which no load is more than an element wide.
"""

import linecache
import os
from collections import namedtuple
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.vocab.mosaic.positions import Operands, Partials, Positions, Upstream
from onchip.vocab.triton import blocks, gradients, softmax
from onchip.vocab.triton.blocks import BufferRows
from onchip.vocab.xla.tiles import TokenStats, Wanted

Array = jax.Array
VOCAB_TILE: int = blocks.VOCAB_TILE.value


class Code(str):
    """What an entry computes for a parameter, from its own arrays and constants."""


class Launch(NamedTuple):
    """What the calls of one problem have in common."""

    positions: Positions
    tiles: Mapping[str, Mapping[str, int]]
    programs: int

    def logits(self, operands: Operands) -> dict[str, Any]:
        """What a kernel makes logits from."""
        hidden, inner = operands.rows.shape[1], operands.inner_scale
        return {
            "rows": operands.rows,
            "weight": operands.weight,
            "bias": operands.bias,
            "vectors": {"number": operands.number, "label": operands.label, "factor": operands.factor},
            "T": len(operands.rows),
            "rows_stride": hidden,
            "weight_stride": hidden,
            "inner_scale": None if inner is None else Code("tl.load(inner)"),
            **({} if inner is None else {"inner": inner}),
        }


def call(
    launch: Launch, kernel: Any, arguments: Mapping[str, Any], outputs: Mapping[str, jax.ShapeDtypeStruct | Array]
) -> dict[str, Array]:
    """The kernel's outputs.

    `arguments`, by the kernel's parameters, are arrays, constants, `Code`, or structures of these, by their fields'
    names; further arrays are for the code, which is over the names of all.  An output that is given as an array has
    its memory, and its values at first.
    """
    tile, (vocab, hidden) = launch.tiles[kernel.fn.__name__], launch.positions.layer.weight.shape
    cut = {"GROUP": tile["group"], "PROGRAMS": launch.programs, "BLOCK_K": tile["depth"], "PARTS": tile["parts"]}
    arguments = {**arguments, **cut, "H": hidden, "V": vocab, "TMA": False}
    structures = {name: x for name, x in arguments.items() if isinstance(x, dict)}
    named = [x for known in (arguments, *structures.values()) for x in known.items()]
    inputs = {name: x for name, x in named if isinstance(x, jax.Array)}
    before = {f"{name}_before": x for name, x in outputs.items() if isinstance(x, jax.Array)}
    code: dict[str, Any] = {name: x for name, x in arguments.items() if isinstance(x, Code) or x is None}
    for name, known in structures.items():
        code[name] = tuple((field, field if isinstance(x, jax.Array) else x) for field, x in known.items())
    constants = {name: x for name, x in arguments.items() if name not in inputs and name not in code}
    given = (*inputs, *before, *outputs)
    made = triton_call(
        *inputs.values(),
        *before.values(),
        kernel=_entry(kernel, given, tuple(constants), tuple(code.items())),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs.values()],
        grid=(launch.programs,),
        num_warps=tile["warps"],
        num_stages=tile["stages"],
        input_output_aliases={given.index(x): list(outputs).index(x.removesuffix("_before")) for x in before},
        **constants,
    )
    return dict(zip(outputs, made, strict=True))


@lru_cache
def _entry(kernel: Any, arrays: tuple[str, ...], constants: tuple[str, ...], code: tuple[tuple[str, Any], ...]) -> Any:
    """A kernel of these arrays and constants that calls `kernel`."""
    known = {*arrays, *constants} & {*kernel.arg_names}
    named = [*((name, name) for name in kernel.arg_names if name in known), *code]
    assert {name for name, _ in code} <= {*kernel.arg_names}, kernel.arg_names
    scope = {"kernel": kernel, "tl": tl, "BufferRows": BufferRows, "__name__": __name__}
    for i, (name, value) in enumerate(named):
        if isinstance(value, tuple):
            scope[f"{name}_fields"] = namedtuple(name, [field for field, _ in value])
            named[i] = (name, f"{name}_fields({', '.join(str(x) for _, x in value)})")
    parameters = ", ".join([*arrays, *(f"{name}: tl.constexpr" for name in constants)])
    arguments = ", ".join(f"{name}={value}" for name, value in named)
    name = f"enter_{kernel.fn.__name__}"
    source = f"def {name}({parameters}):\n    kernel({arguments})\n"
    # Triton reads a kernel's source where Python's own tools find it.
    file = f"<{name} {hash((arrays, constants, code)):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), scope)
    return triton.jit(scope[name])


def triton_call(*arguments: Any, **options: Any) -> Any:
    """jax_triton.triton_call; the package is imported on first use, for it needs a GPU build of JAX."""
    folder = os.environ.get("TRITON_CACHE_DIR")
    import jax_triton

    # It sets the variable to "", which would spoil Triton's cache for whoever else uses it in the process.
    if folder is None:
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = folder
    return jax_triton.triton_call(*arguments, **options)


# ----------------------------------------------------------------------------------------------------------- kernels


def softmax_tiles(launch: Launch, wanted: Wanted, operands: Operands) -> Partials:
    """The softmax of each tile of logits."""
    vocab, tokens = launch.positions.layer.vocab, len(operands.rows)
    empty = jax.eval_shape(lambda: Partials.empty(-(-vocab // VOCAB_TILE), tokens, wanted))._asdict()
    outputs = {name: x for name, x in empty.items() if x is not None}
    arguments = {
        **launch.logits(operands),
        "class_weight": operands.class_weight,
        "labels": None,
        "partials": {name: name if name in outputs else None for name in empty}
        | {**dict.fromkeys(("squares", "below", "mass", "cost")), "stride": tokens},
        "exponentials": None,
        "buffer": None,
        "first": 0,
        "exponential_scale": 1.0,
        "RAGGED": vocab % VOCAB_TILE > 0,
        "BLOCK_T": launch.tiles["softmax_tiles"]["rows"],
    }
    return Partials(**call(launch, softmax.softmax_tiles, arguments, outputs))


class Chunk(NamedTuple):
    """A chunk of the vocabulary: its first tile, which may be traced, and how many there are."""

    first: Any
    tiles: int

    def arguments(self, tokens: int) -> dict[str, Any]:
        """With where the logits' gradient of so many positions is, all of it recomputed."""
        return {
            # The number too: chunks of all sizes are one compiled kernel.
            "chunk": jnp.stack([jnp.asarray(x, jnp.int32) for x in self]),
            "first_tile": Code("tl.load(chunk)"),
            "chunk_tiles": Code("tl.load(chunk + 1)"),
            "buffer": Code(f"BufferRows(tl.load(chunk + 1) * {tokens}, 0, 0, 0, 0, 0, 0, {tokens})"),
        }


def gradient_tiles(launch: Launch, rows: Array, stats: TokenStats, upstream: Upstream, chunk: Chunk) -> Array:
    """The logits' gradient for a chunk of the vocabulary: [tiles * P, 256], tile by tile; of positions beyond the last
    token 0 up to a whole block, and then whatever was there.
    """
    at, tokens, entry = launch.positions, len(rows), upstream.at_target
    if at.inner is not None:
        x = jnp.clip((stats.log_prob[:, 0] + stats.lse) / at.factor, -1, 1)
        entry *= 1 - x * x
    arguments = {
        **launch.logits(at.operands(rows, slice(0, tokens))),
        **chunk.arguments(tokens),
        "terms": {"lse": stats.lse, "row_scale": upstream.factor, "even": upstream.even, "entropy_scale": None},
        "at_target": entry,
        "class_weight": at.class_weight,
        "labels": None,
        "first": 0,
        "BLOCK_T": launch.tiles["gradient_tiles"]["rows"],
    }
    outputs = {"exponentials": jax.ShapeDtypeStruct((chunk.tiles * tokens, VOCAB_TILE), rows.dtype)}
    return call(launch, gradients.gradient_tiles, arguments, outputs)["exponentials"]


def hidden_gradient(launch: Launch, exponentials: Array, sums: Array, chunk: Chunk) -> Array:
    """`sums` [P, H] float32 with a chunk's product added, in place."""
    tile, (tokens, hidden) = launch.tiles["hidden_gradient"], sums.shape
    arguments = {
        **chunk.arguments(tokens),
        "exponentials": exponentials,
        "weight": launch.positions.layer.weight,
        "count": launch.positions.number,
        "product_scale": None,
        "first": 0,
        "last": tokens,
        "out_rows": tokens,
        "slice_rows": 0,
        "weight_stride": hidden,
        "out_stride": hidden,
        "SLICES": 1,
        "BLOCK_T": tile["rows"],
        "BLOCK_H": tile["columns"],
    }
    return call(launch, gradients.hidden_gradient, arguments, {"out": sums})["out"]


def weight_gradient(
    launch: Launch, exponentials: Array, rows: Array, out: Array, chunk: Chunk, upstream: Upstream
) -> Array:
    """`out` [V, H] with a chunk's rows of the weight's gradient written, in place."""
    tile, (tokens, hidden) = launch.tiles["weight_gradient"], rows.shape
    arguments = {
        "T": tokens,
        **chunk.arguments(tokens),
        "exponentials": exponentials,
        "rows": rows,
        "count": launch.positions.number,
        "inverse_grad_scale": upstream.inverse_grad_scale,
        "first_row": 0,
        "even_sum": None,
        "recomputed_from": Code("tl.load(chunk)"),
        "rows_stride": hidden,
        "out_stride": hidden,
        "ADD": False,
        "BLOCK_V": tile["rows"],
        "BLOCK_H": tile["columns"],
    }
    return call(launch, gradients.weight_gradient, arguments, {"out": out})["out"]
