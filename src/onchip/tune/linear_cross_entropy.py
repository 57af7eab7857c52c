"""What `onchip tune` needs of linear_cross_entropy: the Triton kernels, the tiles to try, and a problem for each.

What the kernels before it would have left is made up, of the same kind and size.  Triton is imported where something is
launched, so that stored configs can be listed without it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core.sizes import DTYPE_BYTES, up
from onchip.frontend.options import LossOptions
from onchip.tune.harness import worst_error
from onchip.tune.vocab_chunk import CASES, DEFAULT_CASES, DTYPES, LSE, SHIFT, chunk_of  # noqa: F401 - an op has them
from onchip.vocab.torch.call import Layer
from onchip.vocab.torch.softmax import Asked
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.triton import setup, tiling
from onchip.vocab.triton.tiling import TOKEN_TILE, VOCAB_TILE

if TYPE_CHECKING:
    from onchip.vocab.triton import launches

# The shared memory per block of the devices that the kernels are written for, in bytes.
HOPPER_SHARED = 232448
KERNELS = tuple(tiling.heuristic_tiles(HOPPER_SHARED))


def candidates(kernel: str) -> list[dict[str, int]]:
    """The tiles to try, Hopper's heuristic ones first.

    Blocks of tokens have 128 rows, no more: exponentials change their place at multiples of 128 tokens, and a block in
    two places would be read from one.  Only the weight's gradient has no tokens in its rows.
    """
    first = tiling.heuristic_tiles(HOPPER_SHARED)[kernel]
    groups = (4, 8, 16, 32)
    # depth, stages, parts
    cuts = [(cut, group) for cut in ((64, 4, 2), (64, 3, 1), (128, 2, 2)) for group in groups]
    cuts += [(cut, group) for cut in ((64, 4, 4), (64, 3, 2)) for group in (8, 16)]
    cuts += [((64, 3, 4), 8), ((32, 3, 4), 8)]  # for devices with less shared memory
    shapes = [(128, 256, *cut, group) for cut, group in cuts]
    if kernel == "weight_gradient":
        shapes += [(256, 128, 64, 4, 2, group) for group in groups]
    names = ("rows", "columns", "depth", "stages", "parts", "group")
    tried = [first | dict(zip(names, shape, strict=True)) for shape in shapes]
    if kernel == "hidden_gradient":  # its result is float32: the same bytes in twice the parts
        tried = [config | {"parts": 2 * config["parts"]} for config in tried]
    return [first, *(config for config in tried if config != first)]


def shared_bytes(kernel: str, config: Mapping[str, int], dtype: str) -> int:
    """Shared memory of a program in bytes: exactly what Triton 3.6 takes with TMA; less without."""
    rows, columns, stages = config["rows"], config["columns"], config["stages"]
    element = DTYPE_BYTES[dtype]
    operands = stages * (rows + columns) * config["depth"] * element
    result = rows * columns // config["parts"] * (4 if kernel == "hidden_gradient" else element)
    reduction = 4 * rows if kernel == "softmax_tiles" else 0
    barriers = 8 * stages
    return operands + result + reduction + barriers


@dataclass(frozen=True)
class Problem:
    """One kernel's inputs and outputs, for T tokens and a chunk of the vocabulary."""

    run: "launches.Run"
    rows: Tensor  # [T, H]
    terms: "launches.Terms"
    exponentials: Tensor  # [tiles, T up to a multiple of 128, VOCAB_TILE]
    buffer: "launches.LogitBuffer"
    partials: "launches.Partials"
    grad_weight: Tensor  # [V, H]
    sums: Tensor  # [T, H] float32


def make_problem(kernel: str, device: str, dtype: str, *, tokens: int, hidden: int, vocab: int) -> Problem:
    """Seeded inputs on the device; on the CPU for Triton's interpreter."""
    from onchip.vocab.triton import launches

    generator = torch.Generator(device).manual_seed(0)
    kind: torch.dtype = getattr(torch, dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    vocab = chunk_of(vocab)
    tiles, padded = -(-vocab // VOCAB_TILE), up(tokens, TOKEN_TILE)
    weight = (normal(vocab, hidden) / math.sqrt(hidden)).to(kind)
    rows = normal(tokens, hidden).to(kind)
    layer = Layer(rows, weight, None, kind, (True, True, False))
    kept = 0 if kernel == "gradient_tiles" else padded
    config = triton_spec.TritonPlan(tokens, vocab_chunk=tiles * VOCAB_TILE, kept_in_scratch=kept)
    saved = setup.make_saved(layer, config)
    run = setup.make_run(layer, LossOptions(), saved.vectors.zero_())
    vectors = run.vectors
    for by_position in (vectors.position, vectors.order):
        by_position.copy_(torch.arange(tokens, device=device))
    vectors.label.copy_(torch.randint(vocab, (tokens,), generator=generator, device=device))
    vectors.number.fill_(tokens)
    vectors.factor.fill_(1.0)
    vectors.shift.fill_(SHIFT)
    lse = torch.full((tokens,), LSE, device=device)
    terms = launches.Terms(
        row_scale=torch.ones_like(lse),
        even=None,
        entropy_scale=None,
        mean=None,
        product_scale=torch.rand(tokens, generator=generator, device=device) + 0.5,
        lse=lse,
        entry=torch.full_like(lse, math.expm1(-LSE)),
        entry_label=vectors.label,
        inverse_grad_scale=None,
    )

    buffer = setup.logit_buffer(layer, config, saved, padded - kept)
    exponentials = buffer.pieces[0].view(tiles, padded, VOCAB_TILE)
    for tile in exponentials:  # one by one, as each takes more memory in float32
        tile.copy_(normal(padded, VOCAB_TILE).exp_())
    return Problem(
        run,
        rows,
        terms,
        exponentials,
        buffer,
        launches.Partials.empty(vocab, tokens, torch.device(device), Asked()),
        grad_weight=torch.empty_like(weight),
        sums=torch.empty(tokens, hidden, device=device),
    )


def _outputs(kernel: str, p: Problem) -> tuple[Tensor, ...]:
    """What the kernel writes."""
    return {
        "softmax_tiles": (p.partials.maximum, p.partials.others, p.exponentials[:, : p.run.tokens]),
        "gradient_tiles": (p.exponentials[:, : p.run.tokens],),
        "weight_gradient": (p.grad_weight,),
        "hidden_gradient": (p.sums,),
    }[kernel]


def step(kernel: str, problem: Problem, config: Mapping[str, int]) -> Callable[[], tuple[Tensor, ...]]:
    """A launch of the kernel with these tiles.  Its outputs are NaN until it first runs."""
    from onchip.vocab.triton import launches

    p, outputs = problem, _outputs(kernel, problem)
    # The kernels in Gluon have no tiles to choose from.
    run = replace(p.run, tiles={**p.run.tiles, kernel: launches.Tiles(**config)}, gluon=False)
    tiles = run.vocab_tiles
    launch = {
        "softmax_tiles": lambda: launches.softmax(run, p.rows, p.partials, p.buffer, 0),
        "gradient_tiles": lambda: launches.gradient(run, p.rows, p.terms, p.buffer, 0, tiles),
        "weight_gradient": lambda: launches.weight_product(
            run, p.buffer, p.rows, launches.Sum(p.grad_weight), None, None, 0, 0, tiles, add=False
        ),
        "hidden_gradient": lambda: launches.hidden_product(
            run, p.buffer, p.terms.product_scale, p.sums, False, 0, tiles, positions=(0, run.tokens)
        ),
    }[kernel]()
    for out in outputs:
        out.fill_(math.nan)

    def launched() -> tuple[Tensor, ...]:
        if kernel == "hidden_gradient":  # which adds to what is there
            p.sums.zero_()
        launch.run()
        return outputs

    return launched


def reference(kernel: str, problem: Problem) -> tuple[Tensor, ...]:
    """The kernel's outputs by float32 products of the same operands."""
    p = problem
    padding = len(p.exponentials) * VOCAB_TILE - p.run.vocab
    rows, weight = p.rows.float(), F.pad(p.run.weight.float(), (0, 0, 0, padding))
    kept = p.exponentials[:, : p.run.tokens].float().transpose(0, 1).flatten(1)  # [T, V]
    if kernel == "weight_gradient":
        return ((kept.T @ rows)[: p.run.vocab],)
    if kernel == "hidden_gradient":
        return (kept @ weight * p.terms.product_scale[:, None],)
    z = rows @ weight.T
    z[:, p.run.vocab :] = -math.inf
    at_target = p.run.vectors.label[:, None] == torch.arange(z.shape[1], device=z.device)
    # [tiles, T, VOCAB_TILE] from here on.
    z, at_target = (x.unflatten(1, (-1, VOCAB_TILE)).transpose(0, 1) for x in (z, at_target))
    if kernel == "gradient_tiles":
        return ((z - LSE).exp().masked_fill(at_target, math.expm1(-LSE)),)
    top = z.amax(2, keepdim=True)
    others = (z - top).exp().masked_fill(at_target, 0.0).sum(2)
    return top[..., 0], others, (z - SHIFT).exp().masked_fill(at_target, 0.0) * p.run.exponential_scale


def check(kernel: str, reference: Sequence[Tensor], returned: Sequence[Tensor]) -> tuple[float, float]:
    """The error of the output that comes nearest its bound or passes it furthest, and that bound."""
    return worst_error(returned, reference)
