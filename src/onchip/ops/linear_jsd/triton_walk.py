"""linear_jsd's own Triton kernels: their launches, and the walks over chunks that say what runs when, on what memory.

`forward` takes chunks of tokens: two products leave both models' logits (below each tile's largest), and one kernel
reads each token's row of both twice, first for the loss and the gradients' means, then for the logits' gradients.
These stay in a `LogitBuffer`, of which `backward` makes hidden's and weight's gradients with vocab/triton's products.
A token's factor (its weight, the upstream gradient) goes into the rows of hidden for the weight's gradient and into the
result's rows for hidden's.

Logits that are given are read where the tiles would be.  Nothing here waits for the device.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onchip.core.sizes import up
from onchip.frontend import torch_prepared as stated
from onchip.frontend.options import LossOptions
from onchip.frontend.torch_register import Wanted
from onchip.kernels.triton.launch import Launch
from onchip.ops.linear_jsd import triton_kernels as kernels
from onchip.ops.linear_jsd.torch_call import PARAMETERS, Call
from onchip.ops.linear_jsd.triton_kernels import Gradient, Logits
from onchip.ops.linear_jsd.triton_memory import JsdPlan, config_of
from onchip.ops.linear_jsd.triton_op import Left
from onchip.vocab.rows.launches import reduce_losses
from onchip.vocab.torch.call import Layer
from onchip.vocab.triton import setup
from onchip.vocab.triton.launches import FEW, gather, low_rows
from onchip.vocab.triton.memory import TritonPlan
from onchip.vocab.triton.products import Products, chunks, float16_scale
from onchip.vocab.triton.records import LogitBuffer, Picked, Run, Tiles, Vectors
from onchip.vocab.triton.setup import Gradients, Saved
from onchip.vocab.triton.tiling import TOKEN_TILE, VOCAB_TILE
from onchip.vocab.triton.token_launches import compact

# Tiles of a token's row that a program takes at a time, and its warps.
_TILES, _WARPS = 8, 8
# Registers of a thread, by the bytes of a number that it reads: of 48 five programs fit a multiprocessor, so that the
# tokens of a chunk are all at work at once; numbers of 4 bytes take 64.
_REGISTERS = {2: 48, 4: 64}


@dataclass(frozen=True)
class Side:
    """One model's last layer."""

    layer: Layer
    config: TritonPlan  # how the engine cuts the layer's gradients
    run: Run  # of the layer's entries that count


@dataclass(frozen=True)
class Pair:
    """Both models of a call, the student (0) and the teacher (1), and what is known of its tokens."""

    call: Call
    sides: Mapping[int, Side]  # of both, of the student or of none
    given: Mapping[int, Logits]  # of the others
    vectors: Vectors
    ids: Tensor  # [T, 1] int64: the targets
    ignore_index: int
    target_logit: Tensor  # [T] float32
    stats: Tensor  # [STATS, T] float32

    @staticmethod
    def of(call: Call, plan: JsdPlan, vectors: Tensor, stats: Tensor) -> "Pair":
        tokens, (target, ignore_index) = call.number, call.targets()
        ids = stated.converted(target, lambda x: x.reshape(-1, 1).to(torch.int64).contiguous())
        target_logit = stated.empty(tokens, torch.float32, target.device)
        sides, given = {}, {}
        for who, model in enumerate(call.models):
            layer = call.layer(who)
            if layer is not None:
                # The products are linear_cross_entropy's, and tiles that suit them there do here.
                bias = None if layer.bias is None else layer.bias[: call.size]
                counted = replace(layer, weight=layer.weight[: call.size], bias=bias)
                run = setup.make_run(counted, LossOptions(), vectors)
                sides[who] = Side(layer, config_of(call.head(who), plan), run)
            elif model.logits is not None:
                x = stated.converted(model.logits, _rows)
                given[who] = Logits(x, x.stride(0), None, None, None)
        return Pair(call, sides, given, Vectors.unpack(vectors, tokens), ids, ignore_index, target_logit, stats)

    @property
    def tiles(self) -> int:
        return -(-self.call.size // VOCAB_TILE)

    def number_tokens(self) -> None:
        """Number the tokens that are not ignored; of given logits find their labels, which `gather` does otherwise."""
        compact(self.vectors, self.ids, self.ignore_index).run()
        if not self.sides:
            stated.call(_put_labels, self.vectors.label, self.ids, self.vectors.order, self.call.size)

    def gather(self, who: int, rows: Tensor, first: int) -> None:
        """Put a model's hidden states of the positions from `first` on in `rows`."""
        side = self.sides[who]
        hidden = side.layer.hidden.reshape(-1, side.run.hidden)
        picked = Picked(self.target_logit if who == 0 else stated.empty_like(self.target_logit), None, None)
        gather(side.run, hidden, self.ids, self.ignore_index, None, picked, rows, first).run()


def _rows(x: Tensor) -> Tensor:
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _put_labels(label: Tensor, ids: Tensor, order: Tensor, size: int) -> Tensor:
    target = ids[order, 0]
    return label.copy_(target.masked_fill((target < 0) | (target >= size), -1))


def empty_tiles(run: Run, tiles: int, tokens: int, *, sums: bool, hard: bool) -> Logits:
    """Memory for a chunk of one model's logits, as `logit_tiles` leaves it; what is recomputed needs no sums."""
    rows, weight = up(tokens, TOKEN_TILE), run.weight

    def make(wanted: bool) -> Tensor | None:
        return stated.empty((rows, tiles), torch.float32, weight.device) if wanted else None

    dtype = torch.float32 if weight.dtype == torch.float16 else torch.float16
    below = stated.empty((tiles * rows, VOCAB_TILE), dtype, weight.device)
    return Logits(below, VOCAB_TILE, make(True), make(sums), make(hard))


# ---------------------------------------------------------------------------------------------------------- launches


def logits(pair: Pair, run: Run, rows: Tensor, out: Logits, first: int, first_tile: int, tiles: int) -> Launch:
    """Logits of the positions from `first` on, of which `rows` has the hidden states."""

    def launch(t: Tiles) -> Launch:
        parts = t.parts * out.numbers.element_size() // 2  # the same bytes in shared memory
        arguments = {
            **out._asdict(),
            **run.weight_blocks(VOCAB_TILE, t.depth),
            "rows": run.operand(rows, t.rows, t.depth),
            "rows_stride": rows.stride(0),
            "C": len(rows),
            "label": pair.vectors.label[first:],
            "below": run.operand(out.numbers, t.rows, VOCAB_TILE // parts),
            "below_rows": len(out.numbers),
            "tile_rows": len(out.largest),
            "first": first,
            "first_tile": first_tile,
            "chunk_tiles": tiles,
            "inverse_temperature": 1 / pair.call.options.temperature,
            "BLOCK_T": t.rows,
            "PARTS": parts,
        }
        return run.product(kernels.logit_tiles, t, arguments)

    tiles_of_logits = run.tiles["softmax_tiles"]
    made = launch(tiles_of_logits)
    if run.bias is None or not made.spills(FEW):
        return made
    return launch(replace(tiles_of_logits, rows=min(tiles_of_logits.rows, low_rows(run))))


def divergence(
    pair: Pair,
    made: Mapping[int, Logits],  # of the models whose logits aren't given
    first: int,
    tokens: int,  # from position `first` on
    first_tile: int,
    tiles: int,
    into: Mapping[int, LogitBuffer | Tensor],  # for the logits' gradients that are wanted
    *,
    loss: Tensor | None = None,  # [T] float32 out, by token: with it statistics are made, else used
    token_weight: Tensor | None = None,  # [T] float32
    row_scale: Tensor | None = None,  # [T] float32, by position
    **more: Any,
) -> Launch:
    """Losses of some positions, and their logits' gradients; `more` are arguments in the place of the call's."""
    call, options, beta = pair.call, pair.call.options, pair.call.options.beta
    models = {**pair.given, **made}
    arguments: dict[str, Any] = {}
    for k, who in enumerate(("student", "teacher")):
        to, wanted = into.get(k), any(call.grads_of(k))
        matrix = to.matrix if isinstance(to, LogitBuffer) else to
        rows = to.rows if isinstance(to, LogitBuffer) else None
        arguments |= {
            who: models[k],
            f"{who}_gradient": Gradient(matrix, 0 if matrix is None else matrix.stride(0), rows),
            # At the ends one of the gradients is a plain difference, s - t.
            f"{who.upper()}_MEAN": wanted and beta != k,
            # Gradients that are kept need a factor, for float16's range.
            f"{who.upper()}_SCALED": wanted and call.dtypes[k] == torch.float16,
        }
    pad = TOKEN_TILE if pair.sides else 1
    arguments |= {
        **pair.vectors.known,
        "stats": pair.stats,
        "loss": loss,
        "target_logit": pair.target_logit,
        "token_weight": token_weight,
        "row_scale": row_scale,
        "first": first,
        "first_tile": first_tile,
        "tiles": tiles,
        "tile_rows": max((len(x.largest) for x in made.values()), default=0),
        "T": call.number,
        "V": call.size,
        "inverse_temperature": 1 / options.temperature,
        "beta": beta,
        "near": tuple(nearly_equal(beta)),
        "soft_weight": options.soft_factor,
        "hard_weight": options.hard_weight,
        "MODE": {0.0: kernels.FORWARD_KL, 1.0: kernels.REVERSE_KL}.get(beta, kernels.MIXTURE).value,
        "EVEN": beta == 0.5,
        "HARD": options.hard_weight > 0,
        "TERMS": True,
        "KNOWN": False,
        "TILES": _TILES,
        "PAD": pad,
    }
    registers = _REGISTERS[max(x.numbers.element_size() for x in models.values())]
    return Launch(kernels.divergence_rows, (up(tokens, pad),), arguments | more, _WARPS, registers=registers)


@lru_cache(maxsize=64)
def nearly_equal(beta: float) -> list[float]:
    """Coefficients c of a term of the loss where both models' probabilities, p and q, are nearly equal.

    With x = log2(q / p), |x| < NEAR, the term is log(2) p x^2 (c[0] + c[1] x + ...), 1e-6 off at most: p is the
    student's and q the teacher's, but for beta 0, where p is the teacher's.
    """
    near = kernels.NEAR.value

    def ratio(x: Any) -> Any:
        d = x * math.log(2)
        if beta in (0, 1):
            term = np.expm1(d) - d
        else:
            log_p = -np.log1p(beta * np.expm1(d))  # over the mixture
            term = (1 - beta) * log_p + beta * np.exp(d) * (log_p + d)
        return term / (math.log(2) * x**2)

    # Of an odd degree: the nodes keep away from 0.
    fit = np.polynomial.Chebyshev.interpolate(ratio, 5, domain=[-near, near])
    return [float(c) for c in fit.convert(kind=np.polynomial.Polynomial).coef]


# ------------------------------------------------------------------------------------------------------------- walks


def forward(call: Call, plan: JsdPlan, left: Left) -> Tensor:
    """The loss; fills in `left`."""
    pair = Pair.of(call, plan, stated.zero(left.vectors), left.stats)
    loss = stated.zeros(call.number, torch.float32, call.first.device)
    if call.number:
        pair.number_tokens()
        _chunks_of_tokens(pair, plan, (left.student, left.teacher), loss)
    if call.options.reduction == "none":
        return loss.view(call.shape)
    number, mean = pair.vectors.number, call.options.reduction == "mean"
    return reduce_losses(loss, number, _divisor(call, number), mean=mean)


def _divisor(call: Call, number: Tensor) -> Tensor | None:
    """What the loss is divided by, unless it is the number of tokens that are not ignored."""
    return None if call.normalizer is None else call.divisor(number)


def _chunks_of_tokens(pair: Pair, plan: JsdPlan, saved: Sequence[Saved], loss: Tensor) -> None:
    call, tokens, token_weight = pair.call, pair.call.number, setup.flat(pair.call.token_weight)
    chunk, kept = min(plan.token_chunk, tokens), min(plan.kept, tokens)
    rows, made, buffers = {}, {}, {}
    for who, side in pair.sides.items():
        rows[who], buffer = setup.rows_and_buffer(side.layer, side.config, saved[who])
        if buffer is not None:
            buffers[who] = buffer
        hard = call.options.hard_weight > 0 and who == 0
        made[who] = empty_tiles(side.run, pair.tiles, chunk, sums=True, hard=hard)
    for first, size in (*chunks(0, kept, chunk), *chunks(kept, tokens, chunk)):
        for who, of_all in rows.items():
            whole = len(of_all) == tokens  # those of all chunks, for backward
            part = of_all[first : first + size] if whole else of_all[:size]
            if first == 0 or not whole:
                pair.gather(who, of_all if whole else part, first)
            logits(pair, pair.sides[who].run, part, made[who], first, 0, pair.tiles).run()
        into = buffers if first < kept else {}
        divergence(pair, made, first, size, 0, pair.tiles, into, loss=loss, token_weight=token_weight).run()


def backward(call: Call, plan: JsdPlan, left: Left, grad_loss: Tensor, wanted: Wanted) -> list[Tensor | None]:
    """The gradients that are wanted, but for those that `left` has the memory of: these are filled in there."""
    tokens, saved = call.number, (left.student, left.teacher)
    vectors = stated.call(torch.clone, left.vectors)  # launches write to some of them
    pair = Pair.of(call, plan, vectors, left.stats)
    row_scale = _row_scale(call, pair.vectors, grad_loss)
    made: list[Tensor | None] = [None] * len(PARAMETERS)
    if not pair.sides:
        into = {}
        for who, model in enumerate(call.models):
            if model.logits is not None and wanted[4 * who + 3]:
                made[4 * who + 3] = g = stated.zero(stated.empty_like(model.logits))
                into[who] = g.view(tokens, g.shape[-1])
        if tokens:
            divergence(pair, {}, 0, tokens, 0, pair.tiles, into, row_scale=row_scale).run()
        return made
    parts = [wanted[4 * who : 4 * who + 3] for who in (0, 1)]  # of hidden, weight and bias
    grads = {
        who: setup.Gradients.of(side.layer, saved[who], parts[who])
        for who, side in pair.sides.items()
        if any(parts[who])
    }
    if tokens:
        _chunks_of_vocabulary(pair, plan, row_scale, saved, grads)
    for who, of_side in grads.items():
        if of_side.weight is not None:
            stated.zero(of_side.weight[call.size :])  # padding
        made[4 * who : 4 * who + 3] = of_side.made(pair.sides[who].layer.dtypes[2])
    return made


def _row_scale(call: Call, vectors: Vectors, grad_loss: Tensor) -> Tensor:
    """The factor of each position's gradients."""
    grad_loss, apart = grad_loss.reshape(-1), call.options.reduction == "none"
    arguments = {
        **vectors.known,
        "grad_loss": grad_loss,
        "grad_stride": grad_loss.stride(0) if apart else 0,
        "divisor": _divisor(call, vectors.number),
        "token_weight": setup.flat(call.token_weight),
        "out": (out := stated.empty_like(vectors.factor)),
        "T": call.number,
        "MEAN": call.options.reduction == "mean",
        "BLOCK": 256,
    }
    if call.number:
        Launch(kernels.row_scales, (-(-call.number // 256),), arguments).run()
    return out


def _chunks_of_vocabulary(
    pair: Pair, plan: JsdPlan, row_scale: Tensor, saved: Sequence[Saved], grads: Mapping[int, Gradients]
) -> None:
    """Fill in the gradients of hidden states, weights and biases."""
    tokens, kept = pair.call.number, min(plan.kept, pair.call.number)
    left, chunk_tiles = tokens - kept, plan.vocab_chunk // VOCAB_TILE
    row_scales, products = {}, {}
    for who, to in grads.items():
        side = pair.sides[who]
        row_scales[who], kept_scale, inverse = _scales(pair, who, row_scale, side.layer.dtype)
        products[who] = Products.of(side.run, side.layer, side.config, saved[who], to, kept_scale, inverse)
        products[who].take_kept()
    heads = {}
    for who, side in pair.sides.items() if left else ():
        if who in products:
            rows = products[who].rows[kept:]
        else:
            rows = stated.empty((left, side.run.hidden), side.run.weight.dtype, side.run.weight.device)
            pair.gather(who, rows, kept)
        heads[who] = rows, empty_tiles(side.run, min(chunk_tiles, pair.tiles), left, sums=False, hard=False)
    for first, count in chunks(0, pair.tiles, chunk_tiles):
        made = {}
        for who, (rows, out) in heads.items():
            largest = out.largest.view(-1)[: len(out.largest) * count].view(-1, count)
            made[who] = out._replace(largest=largest)
            logits(pair, pair.sides[who].run, rows, made[who], kept, first, count).run()
        for who, p in products.items() if left else ():
            divergence(pair, made, kept, left, first, count, {who: p.buffer}, row_scale=row_scales[who]).run()
        for p in products.values():
            p.take_hidden(first, count)
            p.take_chunk(first, count)
    for p in products.values():
        p.finish()


def _scales(pair: Pair, who: int, row_scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """The factors of a side's rows of gradients that are made now and of those that were kept, and what undoes them.

    float16 can't hold a gradient of 1e-8: kept ones were scaled to below 2^14, and here the largest factor of one is
    made 1, so that the others stay below that too.
    """
    first = (kernels.STUDENT, kernels.TEACHER)[who].value
    inverse = pair.stats[first + kernels.INVERSE_SCALE.value]
    kept = stated.call(torch.mul, row_scale, inverse) if dtype == torch.float16 else row_scale
    grad_scale = float16_scale(kept, pair.vectors, dtype, largest=1.0)
    if grad_scale is None:
        return row_scale, kept, None
    row_scale, kept = (stated.call(torch.mul, x, grad_scale) for x in (row_scale, kept))
    return row_scale, kept, stated.call(torch.reciprocal, grad_scale)
