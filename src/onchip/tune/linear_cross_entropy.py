"""What `onchip tune` needs of linear_cross_entropy: the Triton kernels, the tiles to try, and a problem for each.

Each kernel runs alone, on one chunk of the vocabulary: `CHUNK_TILES` tiles take more memory than any L2 holds, and
every case less than 4 GB.  What the kernels before it would have left is made up, of the same kind and size.  Triton is
imported where something is launched, so that stored configs can be listed without it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core.sizes import DTYPE_BYTES
from onchip.ops.linear_cross_entropy.cases import LLAMA_TOKEN_SWEEP, MODEL_CASES, Case
from onchip.vocab.torch import tiles as torch_tiles
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.triton.memory import TOKEN_TILE, VOCAB_TILE, up

if TYPE_CHECKING:
    from onchip.vocab.triton import launches

# The shared memory per block of the devices that the kernels are written for, in bytes.
HOPPER_SHARED = 232448
KERNELS = tuple(triton_spec.heuristic_tiles(HOPPER_SHARED))
CASES: Mapping[str, Case] = {
    case.name: case for case in (*MODEL_CASES, *(c for c in LLAMA_TOKEN_SWEEP if c.tokens in (1024, 16384)))
}
DEFAULT_CASES = tuple(CASES)
DTYPES = ("bfloat16", "float16")

CHUNK_TILES = 64
# Exponentials are relative to this: well in the range of float16, whose exponentials are scaled up by 2**15.
_SHIFT = 8.0
# Small enough that probabilities weigh as much as the targets' entries, next to which errors in them would go unseen.
_LSE = 4.0
# ||out - reference|| / ||reference||: four times the rounding of bfloat16, and a sum in float32.
_BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float32: 1e-3}


def sizes(case: Case) -> dict[str, int]:
    """The sizes by which a config is stored and found, in elements."""
    return {"tokens": case.tokens, "hidden": case.hidden, "vocab": case.vocab}


def candidates(kernel: str, case: Case, dtype: str) -> list[dict[str, int]]:
    """The tiles to try, Hopper's heuristic ones first.

    Blocks of tokens have 128 rows, no more: exponentials change their place at multiples of 128 tokens, and a block in
    two places would be read from one.  Only the weight's gradient has no tokens in its rows.
    """
    first = triton_spec.heuristic_tiles(HOPPER_SHARED)[kernel]
    groups = (4, 8, 16, 32)
    # depth, stages, parts
    cuts = [(cut, group) for cut in ((64, 4, 2), (64, 3, 1), (128, 2, 2)) for group in groups]
    cuts += [(cut, group) for cut in ((64, 4, 4), (64, 3, 2)) for group in (8, 16)]
    cuts += [((64, 3, 4), 8), ((32, 3, 4), 8)]  # for devices with less shared memory
    shapes = [(128, 256, *cut, group) for cut, group in cuts]
    if kernel == "weight_gradient":
        shapes += [(256, 128, 64, 4, 2, group) for group in groups]
    wider = 2 if kernel == "hidden_gradient" else 1  # its result is float32: the same bytes in twice the parts
    tried = [
        {
            "rows": rows,
            "columns": columns,
            "depth": depth,
            "group": group,
            "warps": 8,
            "stages": stages,
            "parts": parts * wider,
        }
        for rows, columns, depth, stages, parts, group in shapes
    ]
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
    vectors: "launches.Vectors"
    terms: "launches.Terms"
    exponentials: Tensor  # [tiles, T up to a multiple of 128, VOCAB_TILE]
    buffer: "launches.LogitBuffer"
    partials: "launches.Partials"
    grad_weight: Tensor  # [V, H]
    sums: Tensor  # [T, H] float32


def make_problem(kernel: str, case: Case, device: str, dtype: str) -> Problem:
    """Seeded inputs on the device; on the CPU for Triton's interpreter."""
    from onchip.vocab.triton import launches

    generator = torch.Generator(device).manual_seed(0)
    kind: torch.dtype = getattr(torch, dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    def blank(wanted: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape if wanted else (0, shape[-1]), device=device, dtype=dtype)

    tokens, hidden = case.tokens, case.hidden
    # The last tile is as full as the whole vocabulary's.
    vocab = min(case.vocab, CHUNK_TILES * VOCAB_TILE - -case.vocab % VOCAB_TILE)
    tiles, padded = -(-vocab // VOCAB_TILE), up(tokens, TOKEN_TILE)
    weight = (normal(vocab, hidden) / math.sqrt(hidden)).to(kind)
    run = launches.Run(
        torch_tiles.Head(weight, None, 0.0, 0.0, None, 1.0), tokens, {}, *_programs_and_tma(device, hidden)
    )
    heuristic = triton_spec.heuristic_tiles(HOPPER_SHARED)
    run = replace(run, tiles={name: launches.Tiles(**tile) for name, tile in heuristic.items()})

    vectors = launches.Vectors.empty(tokens, torch.device(device))
    for by_position in (vectors.position, vectors.order):
        by_position.copy_(torch.arange(tokens, device=device))
    vectors.label.copy_(torch.randint(vocab, (tokens,), generator=generator, device=device))
    vectors.number.fill_(tokens)
    vectors.factor.fill_(1.0)
    vectors.shift.fill_(_SHIFT)
    lse = torch.full((tokens,), _LSE, device=device)
    terms = launches.Terms(
        row_scale=torch.ones_like(lse),
        even=None,
        entropy_scale=None,
        mean=None,
        product_scale=torch.rand(tokens, generator=generator, device=device) + 0.5,
        lse=lse,
        entry=torch.full_like(lse, math.expm1(-_LSE)),
        entry_label=vectors.label,
        inverse_grad_scale=None,
    )

    exponentials = torch.empty(tiles, padded, VOCAB_TILE, device=device, dtype=kind)
    for tile in exponentials:  # one by one, as each takes more memory in float32
        tile.copy_(normal(padded, VOCAB_TILE).exp_())
    memory, nothing = exponentials.view(-1), exponentials.view(-1)[:0]
    recomputed = kernel == "gradient_tiles"
    buffer = launches.logit_buffer(
        nothing if recomputed else memory,
        0,
        padded,
        0 if recomputed else padded,
        nothing,
        0,
        memory if recomputed else nothing,
        padded if recomputed else 0,
    )
    return Problem(
        run,
        normal(tokens, hidden).to(kind),
        vectors,
        terms,
        exponentials,
        buffer,
        launches.Partials.empty(tiles, tokens, torch.device(device), smoothing=False, stats=False),
        blank(kernel == "weight_gradient", vocab, hidden, dtype=kind),
        blank(kernel == "hidden_gradient", tokens, hidden),
    )


def _programs_and_tma(device: str, hidden: int) -> tuple[int, bool]:
    if device == "cpu":
        return 4, True
    p = torch.cuda.get_device_properties(torch.cuda.current_device())
    return p.multi_processor_count, p.major >= 9 and hidden % 8 == 0


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
    run = replace(p.run, tiles={**p.run.tiles, kernel: launches.Tiles(**config)})
    tiles = run.vocab_tiles
    launch = {
        "softmax_tiles": lambda: launches.softmax(run, p.rows, p.vectors, p.partials, p.buffer, 0),
        "gradient_tiles": lambda: launches.gradient(run, p.rows, p.vectors, p.terms, p.buffer, 0, tiles),
        "weight_gradient": lambda: launches.weight_product(
            run, p.buffer, p.rows, p.vectors, p.grad_weight, None, 0, 0, tiles, add=False
        ),
        "hidden_gradient": lambda: launches.hidden_product(
            run, p.buffer, p.vectors, p.terms.product_scale, p.sums, False, 0, tiles
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
    if kernel == "softmax_tiles":
        parts = [_softmax(z, at_target, p.run.exponential_scale) for z, at_target in _logits(p)]
        return tuple(torch.stack(out) for out in zip(*parts, strict=True))
    if kernel == "gradient_tiles":
        return (torch.stack([(z - _LSE).exp().masked_fill(y, math.expm1(-_LSE)) for z, y in _logits(p)]),)
    exponentials = [tile[: p.run.tokens].float() for tile in p.exponentials]
    if kernel == "weight_gradient":
        return (torch.cat([e.T @ p.rows.float() for e in exponentials])[: p.run.vocab],)
    weights = [w.float() for w in p.run.head.weight.split(VOCAB_TILE)]
    product = sum(e[:, : len(w)] @ w for e, w in zip(exponentials, weights, strict=True))
    return (product * p.terms.product_scale[:, None],)


def _logits(p: Problem) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each tile the logits [T, VOCAB_TILE], -inf past the vocabulary's end, and where the targets are."""
    rows, labels = p.rows.float(), p.vectors.label[:, None]
    for j, weight in enumerate(p.run.head.weight.split(VOCAB_TILE)):
        z = F.pad(rows @ weight.float().T, (0, VOCAB_TILE - len(weight)), value=-math.inf)
        yield z, labels == j * VOCAB_TILE + torch.arange(VOCAB_TILE, device=z.device)


def _softmax(z: Tensor, at_target: Tensor, exponential_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of a tile: the maximum, and without the target's the sum of exponentials, and the exponentials to be kept."""
    top = z.amax(1)
    others = (z - top[:, None]).exp().masked_fill(at_target, 0.0).sum(1)
    return top, others, (z - _SHIFT).exp().masked_fill(at_target, 0.0) * exponential_scale


def check(kernel: str, reference: Sequence[Tensor], returned: Sequence[Tensor]) -> tuple[float, float]:
    """The relative error of the output that comes nearest its bound or passes it furthest, and that bound."""
    errors = [
        (float((out - ref).norm() / ref.norm()), _BOUNDS[out.dtype])
        for out, ref in zip(returned, reference, strict=True)
    ]
    return max(errors, key=lambda e: math.inf if math.isnan(e[0]) else e[0] / e[1])
