"""What `onchip tune --framework jax` needs of linear_cross_entropy: the Mosaic kernels, the tiles to try, and a problem
for each.

Kernels run under a [V, H] weight; the same tiles serve an [H, V] one.  `hidden_product` and `weight_product` read a
chunk of the logits' gradient, laid out as exponentials are.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from onchip.kernels.mosaic.product import BOX, MosaicConfig
from onchip.tune.harness import worst_error
from onchip.tune.vocab_chunk import CASES, DEFAULT_CASES, DTYPES, LSE, SHIFT, chunk_of  # noqa: F401 - an op has them
from onchip.vocab.mosaic import kernels as mosaic_kernels
from onchip.vocab.mosaic import memory as mosaic_spec
from onchip.vocab.mosaic.blocks import Kept
from onchip.vocab.mosaic.memory import TOKEN_TILE, VOCAB_TILE, up
from onchip.vocab.mosaic.positions import Operands
from onchip.vocab.xla.tiles import Wanted

KERNELS = tuple(mosaic_spec.heuristic_tiles())
Problem = dict[str, Array]


def candidates(kernel: str) -> list[dict[str, int]]:
    """The tiles to try, the heuristic ones first.

    Tokens are padded to 128 alone, so no tile has more of them; and gradients' operands lie in boxes of 64 tokens, of
    which each warpgroup takes one: their tiles can't be split along n.
    """
    first = mosaic_spec.heuristic_tiles()[kernel]
    splits = (0, 1) if kernel in ("mosaic_softmax_tiles", "mosaic_gradient_tiles") else (0,)
    tried = [
        first | {"group": group, "stages": stages, "staging_slots": slots, "split_n": split}
        for split in splits
        for stages, slots in ((4, 2), (3, 4))
        for group in (4, 8, 16, 32)
    ]
    return [first, *(config for config in tried if config != first)]


def shared_bytes(kernel: str, config: Mapping[str, int], dtype: str) -> int:
    """Shared memory of a block in bytes, but for its barriers."""
    return MosaicConfig.from_numbers(config).shared_bytes(stores=True)


def make_problem(kernel: str, device: str, dtype: str, *, tokens: int, hidden: int, vocab: int) -> Problem:
    """Seeded inputs: T tokens rounded up to whole tiles (for softmax_tiles no more than can be kept), and a chunk of
    the vocabulary.
    """
    keys = jax.random.split(jax.random.key(0), 5)
    tokens = up(tokens, TOKEN_TILE)
    if kernel == "mosaic_softmax_tiles":
        tokens = min(tokens, hidden // TOKEN_TILE * TOKEN_TILE)
    vocab = chunk_of(vocab)
    problem = {
        "rows": jax.random.normal(keys[0], (tokens, hidden), dtype),
        "weight": (jax.random.normal(keys[1], (vocab, hidden)) / math.sqrt(hidden)).astype(dtype),
        "label": jax.random.randint(keys[2], (tokens,), 0, vocab),
        "factor": jnp.ones(tokens),
        "count": jnp.full(1, tokens, jnp.int32),
    }
    if kernel in ("mosaic_hidden_product", "mosaic_weight_product"):
        chunk = jnp.exp(jax.random.normal(keys[3], (tokens, up(vocab, VOCAB_TILE)))).astype(dtype)
        # What lies past the vocabulary's end is 0, as it is where exponentials are kept.
        problem["again"] = _to_boxes(chunk.at[:, vocab:].set(0))
        problem["scale"] = jax.random.uniform(keys[4], (tokens,)) + 0.5
    return problem


def step(kernel: str, problem: Problem, config: Mapping[str, int]) -> Callable[[], Sequence[Array]]:
    """A call of the kernel with these tiles, compiled."""
    run = jax.jit(partial(_RUNS[kernel], MosaicConfig.from_numbers(config)))
    return lambda: run(problem)


def _softmax_tiles(config: MosaicConfig, p: Problem) -> Sequence[Array]:
    tokens, vocab = p["rows"].shape[0], p["weight"].shape[0]
    chunk = min(16, vocab // VOCAB_TILE // 2) * VOCAB_TILE
    split = mosaic_spec.split_at(vocab, chunk)
    stash = jax.new_ref(lax.empty(p["weight"].shape, p["weight"].dtype))
    spare = jax.new_ref(lax.empty((up(vocab, VOCAB_TILE) - split, tokens), p["weight"].dtype))
    partials = mosaic_kernels.softmax_tiles(
        (Kept(stash, spare, chunk, split), None),
        _operands(p),
        vocab_major=True,
        wanted=Wanted(),
        shift=jnp.full(tokens, SHIFT),
        config=config,
    )
    kept = jax.freeze(stash)[chunk : chunk + split, :tokens], jax.freeze(spare)
    assert partials is not None
    return partials.maximum, partials.others, *kept


def _operands(p: Problem) -> Operands:
    return Operands(*(p[name] for name in ("rows", "weight", "label", "factor", "count")))


def _gradient_tiles(config: MosaicConfig, p: Problem) -> Sequence[Array]:
    like = jnp.zeros_like(p["factor"])
    out = mosaic_kernels.gradient_tiles(
        _operands(p),
        like + LSE,
        like + 1,
        like + math.expm1(-LSE),
        vocab_major=True,
        first=jnp.zeros(1, jnp.int32),
        size=up(p["weight"].shape[0], VOCAB_TILE),
        config=config,
    )
    return (out,)


def _weight_product(config: MosaicConfig, p: Problem) -> Sequence[Array]:
    out = jax.new_ref(lax.empty(p["weight"].shape, p["weight"].dtype))
    mosaic_kernels.weight_product(
        out,
        p["rows"],
        p["count"],
        vocab_major=True,
        first=jnp.zeros(1, jnp.int32),
        size=up(p["weight"].shape[0], VOCAB_TILE),
        kept_tokens=0,
        recomputed=p["again"],
        config=config,
    )
    return (jax.freeze(out),)


def _hidden_product(config: MosaicConfig, p: Problem) -> Sequence[Array]:
    sums = jax.new_ref(jnp.zeros(p["rows"].shape))
    mosaic_kernels.hidden_product(
        p["weight"],
        p["count"],
        vocab_major=True,
        tokens=p["rows"].shape[0],
        recomputed=p["again"],
        scale=p["scale"],
        add_to=sums,
        halves=True,
        config=config,
    )
    return (jax.freeze(sums),)


_RUNS: Mapping[str, Callable[[MosaicConfig, Problem], Sequence[Array]]] = {
    "mosaic_softmax_tiles": _softmax_tiles,
    "mosaic_gradient_tiles": _gradient_tiles,
    "mosaic_weight_product": _weight_product,
    "mosaic_hidden_product": _hidden_product,
}


@partial(jax.jit, static_argnums=0)
def reference(kernel: str, problem: Problem) -> tuple[Array, ...]:
    """The kernel's results by float32 products of the same operands, exponentials as [tokens, vocab]."""
    vocab = problem["weight"].shape[0]
    if kernel == "mosaic_weight_product":
        return (_dot(_from_boxes(problem["again"])[:, :vocab].T, problem["rows"]),)
    if kernel == "mosaic_hidden_product":
        return (_dot(_from_boxes(problem["again"])[:, :vocab], problem["weight"]) * problem["scale"][:, None],)
    z = _dot(problem["rows"], problem["weight"].T)
    own = jnp.arange(vocab)[None] == problem["label"][:, None]
    if kernel == "mosaic_gradient_tiles":
        return (jnp.where(own, math.expm1(-LSE), jnp.exp(z - LSE)),)
    e = jnp.where(own, 0, jnp.exp(z - SHIFT))
    return jnp.sum(e, 1), e


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def check(kernel: str, reference: Sequence[Array], returned: Sequence[Array]) -> tuple[float, float]:
    """The relative error of the result that comes nearest its bound or passes it furthest, and that bound."""
    results = list(returned)
    if kernel == "mosaic_softmax_tiles":
        maximum, others, *kept = results
        results = [jnp.sum(others * jnp.exp(maximum - SHIFT), 0), _from_boxes(jnp.concatenate(kept))]
    elif kernel == "mosaic_gradient_tiles":
        results = [_from_boxes(results[0])]
    full = [out[:, : ref.shape[1]] if ref.ndim > 1 else out for out, ref in zip(results, reference, strict=True)]
    return worst_error(full, reference)


def _from_boxes(kept: Array) -> Array:
    """[vocab, tokens] in blocks, with tokens for rows inside, as [tokens, vocab]."""
    vocab, tokens = kept.shape
    return kept.reshape(vocab // BOX, BOX, tokens // BOX, BOX).transpose(2, 1, 0, 3).reshape(tokens, vocab)


def _to_boxes(values: Array) -> Array:
    tokens, vocab = values.shape
    return values.reshape(tokens // BOX, BOX, vocab // BOX, BOX).transpose(2, 1, 0, 3).reshape(vocab, tokens)
