"""The launches of linear_jsd's own Triton kernels, and what they know about a call's two models and tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onchip.core.sizes import up
from onchip.frontend import torch_prepared as stated
from onchip.frontend.options import LossOptions
from onchip.frontend.topk import most_log_prob
from onchip.kernels.triton.launch import Launch
from onchip.ops.linear_jsd import triton_kernels as kernels
from onchip.ops.linear_jsd import triton_topk as topk_kernels
from onchip.ops.linear_jsd.divergence import nearly_equal
from onchip.ops.linear_jsd.torch_call import JsdCall, Left
from onchip.ops.linear_jsd.triton_memory import STATS, JsdPlan, config_of
from onchip.ops.linear_jsd.triton_product import logit_tiles
from onchip.ops.linear_jsd.triton_rows import FLOOR, JsdGradient, JsdLogits
from onchip.vocab.torch import parallel
from onchip.vocab.torch.call import Layer
from onchip.vocab.triton import setup
from onchip.vocab.triton.launches import FEW, gather, low_rows
from onchip.vocab.triton.memory import TritonPlan
from onchip.vocab.triton.records import LogitBuffer, Picked, Run, Tiles, Vectors
from onchip.vocab.triton.setup import TritonSaved
from onchip.vocab.triton.tiling import TOKEN_TILE, VOCAB_TILE
from onchip.vocab.triton.token_launches import compact

# How many tiles of a token's row a program takes at a time, and its warps.
_TILES, _WARPS = 8, 8
# Stands for a label that is in no column: no index of logits.
ELSEWHERE = parallel.NO_INDEX
# Registers of a thread, by the bytes of a number that it reads.  With 48, five programs fit on a multiprocessor, so
# that all tokens of a chunk run at once; numbers of 4 bytes need 64.
_REGISTERS = {2: 48, 4: 64}


@dataclass(frozen=True)
class Side:
    """One model's last layer."""

    layer: Layer
    config: TritonPlan  # how the engine cuts the layer's gradients
    saved: TritonSaved  # what forward leaves for them
    run: Run  # of the layer's entries that count


@dataclass(frozen=True)
class Pair:
    """Both models of a call, the student (0) and the teacher (1), and what is known about its tokens."""

    call: JsdCall
    plan: JsdPlan
    sides: Mapping[int, Side]  # of both models, the student alone, or none
    given: Mapping[int, JsdLogits]  # the other models' logits
    vectors: Vectors
    ids: Tensor  # [T, 1] int64: the targets
    ignore_index: int
    target_logit: Tensor  # [T] float32
    stats: Tensor  # [STATS, T] float32, and after these what `numbers` has
    topk: Tensor | None  # [T, K] int32: a top-k teacher's ids, ascending; others than of these logits stand for none

    @staticmethod
    def of(call: JsdCall, plan: JsdPlan, left: Left) -> "Pair":
        """As the call and what is left of it say; launches write to its vectors."""
        tokens, (target, ignore_index) = call.number, call.targets()
        ids = stated.converted(target, lambda x: x.reshape(-1, 1).to(torch.int64).contiguous())
        if call.shards.there:
            ids, ignore_index = parallel.ids_for_kernels(ids, call.shards, ignore_index), parallel.IGNORED
        target_logit = stated.empty(tokens, torch.float32, target.device)
        sides, given = {}, {}
        for who, model in enumerate(call.models):
            layer = call.layer(who)
            if layer is not None:
                # The products are linear_cross_entropy's, and tiles that suit them there do here.
                bias = None if layer.bias is None else layer.bias[: call.size]
                counted = replace(layer, weight=layer.weight[: call.size], bias=bias)
                run = setup.make_run(counted, LossOptions(), left.vectors)
                sides[who] = Side(layer, config_of(call.head(who), plan), (left.student, left.teacher)[who], run)
            elif model.logits is not None:
                x = stated.converted(model.logits, _rows)
                given[who] = JsdLogits(x, x.stride(0), None, None, None)
        topk = None if call.indices is None else stated.call(_topk_ids, call.indices, call.shards.start)
        made = Vectors.unpack(left.vectors, tokens)
        return Pair(call, plan, sides, given, made, ids, ignore_index, target_logit, left.stats, topk)

    @property
    def numbers(self) -> Tensor:
        """[T, K + 2] float32, by position: with a top-k teacher, what gradients are made from."""
        return self.stats[STATS:].view(self.call.number, -1)

    def padded(self, tokens: int) -> int:
        """Programs of a kernel with one for each row: rows of a buffer come in whole tiles."""
        return up(tokens, TOKEN_TILE if self.sides else 1)

    @property
    def tiles(self) -> int:
        return -(-self.call.size // VOCAB_TILE)

    def number_tokens(self) -> None:
        """Number the tokens that are not ignored.  For given logits find their labels; else `gather` does that."""
        compact(self.vectors, self.ids, self.ignore_index).run()
        if not self.sides and self.call.target is not None:  # without targets 0 stands for each, as it does already
            # If another rank has the label, forward reads some other logit and doesn't use it.
            self.put_labels(0 if self.call.shards.there else None)

    def put_labels(self, elsewhere: int | None) -> None:
        """Put all tokens' labels by position: -1 if out of range, `elsewhere` if another rank has it."""
        of_call = self.ids, self.vectors.order, self.call.size, elsewhere
        stated.call(_put_labels, self.vectors.label, *of_call)

    def gather(self, who: int, rows: Tensor, first: int, like: Launch | None = None) -> Launch:
        """Put a model's hidden states, for the positions from `first` on, into `rows`.  Returns the launch, for others
        `like` it.
        """
        if like is None:
            run = self.sides[who].run
            hidden = self.sides[who].layer.hidden.reshape(-1, run.hidden)
            picked = Picked(self.target_logit if who == 0 else stated.empty_like(self.target_logit), None, None)
            like = gather(run, hidden, self.ids, self.ignore_index, None, picked, rows, first).fixed()
        like.again((min(len(rows), self.call.number - first),), rows=rows, first=first).run()
        if self.call.shards.there:
            self.put_labels(ELSEWHERE)
            # It serves as -inf, but 0 times it isn't NaN.
            elsewhere = self.vectors.label == ELSEWHERE
            stated.call(Tensor.masked_fill_, self.target_logit, elsewhere, FLOOR.value)
        return like


def _rows(x: Tensor) -> Tensor:
    x = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _topk_ids(indices: Tensor, start: int) -> Tensor:
    return (indices.reshape(-1, indices.shape[-1]) - start).to(torch.int32)


def _put_labels(label: Tensor, ids: Tensor, order: Tensor, size: int, elsewhere: int | None) -> Tensor:
    target = ids[order, 0]
    there = target.masked_fill((target < 0) | (target >= size), -1)
    if elsewhere is not None:
        there = there.masked_fill(target == parallel.ELSEWHERE, elsewhere)
    return label.copy_(there)


def empty_tiles(run: Run, tiles: int, tokens: int, *, sums: bool, hard: bool) -> JsdLogits:
    """Memory for a chunk of one model's logits, as `logit_tiles` leaves it; logits that are computed again need no
    sums.
    """
    rows, weight = up(tokens, TOKEN_TILE), run.weight

    def make(wanted: bool) -> Tensor | None:
        return stated.empty((rows, tiles), torch.float32, weight.device) if wanted else None

    dtype = torch.float32 if weight.dtype == torch.float16 else torch.float16
    below = stated.empty((tiles * rows, VOCAB_TILE), dtype, weight.device)
    return JsdLogits(below, VOCAB_TILE, make(True), make(sums), make(hard))


# ---------------------------------------------------------------------------------------------------------- launches


def logits(pair: Pair, run: Run, rows: Tensor, out: JsdLogits, first: int, first_tile: int, tiles: int) -> Launch:
    """Logits for the positions from `first` on, whose hidden states are in `rows`."""

    def launch(t: Tiles) -> Launch:
        parts = t.parts * out.numbers.element_size() // 2  # the same bytes in shared memory
        arguments = {
            **out._asdict(),
            **run.weight_blocks(VOCAB_TILE, t.depth),
            **_of_rows(pair, run, rows, first, t.rows, t.depth),
            "rows_stride": rows.stride(0),
            "below": run.operand(out.numbers, t.rows, VOCAB_TILE // parts),
            "below_rows": len(out.numbers),
            "tile_rows": len(out.largest),
            "first_tile": first_tile,
            "chunk_tiles": tiles,
            "inverse_temperature": 1 / pair.call.options.temperature,
            "BLOCK_T": t.rows,
            "PARTS": parts,
        }
        return run.product(logit_tiles, t, arguments)

    tiles_of_logits = run.tiles["softmax_tiles"]
    made = launch(tiles_of_logits)
    if run.bias is None or not made.spills(FEW):
        return made
    return launch(replace(tiles_of_logits, rows=min(tiles_of_logits.rows, low_rows(run))))


def more_logits(made: Launch, pair: Pair, run: Run, rows: Tensor, first: int) -> Launch:
    """What `logits` made, for other positions."""
    cut = made.shared.arguments
    return made.again(**_of_rows(pair, run, rows, first, cut["BLOCK_T"], cut["BLOCK_K"]))


def _of_rows(pair: Pair, run: Run, rows: Tensor, first: int, block: int, depth: int) -> dict[str, Any]:
    """Arguments of `logit_tiles` that depend on the positions."""
    operand, label = run.operand(rows, block, depth), pair.vectors.label[first:]
    return {"rows": operand, "C": len(rows), "label": label, "first": first}


def divergence(
    pair: Pair,
    made: Mapping[int, JsdLogits],  # for the models whose logits aren't given
    first: int,
    tokens: int,  # from position `first` on
    first_tile: int,
    tiles: int,
    into: Mapping[int, LogitBuffer | Tensor],  # for the logits' gradients that are wanted
    *,
    loss: Tensor | None = None,  # [T] float32 out, by token; if given, statistics are made, otherwise used
    token_weight: Tensor | None = None,  # [T] float32
    row_scale: Tensor | None = None,  # [T] float32, by position
    **more: Any,
) -> Launch:
    """Losses for some positions, and their logits' gradients; `more` replaces arguments of the call."""
    call, options, beta = pair.call, pair.call.options, pair.call.options.beta
    models = {**pair.given, **made}
    models.setdefault(1, models[0])  # with a top-k teacher the student's softmax alone is wanted
    arguments: dict[str, Any] = {}
    for k, who in enumerate(("student", "teacher")):
        wanted = any(call.grads_of(k))
        arguments |= {
            who: models[k],
            f"{who}_gradient": _gradient_in(into.get(k)),
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
        "MODE": _mode(beta),
        "EVEN": beta == 0.5,
        "HARD": options.hard_weight > 0,
        "TERMS": True,
        "KNOWN": False,
        "ONE": pair.topk is not None,
        "TILES": _TILES,
        "PAD": pad,
    }
    registers = _REGISTERS[max(x.numbers.element_size() for x in models.values())]
    return Launch(kernels.divergence_rows, (pair.padded(tokens),), arguments | more, _WARPS, registers=registers)


def _mode(beta: float) -> int:
    mode: int = {0.0: kernels.FORWARD_KL, 1.0: kernels.REVERSE_KL}.get(beta, kernels.MIXTURE).value
    return mode


def _gradient_in(to: LogitBuffer | Tensor | None) -> JsdGradient:
    matrix = to.matrix if isinstance(to, LogitBuffer) else to
    return JsdGradient(
        matrix, 0 if matrix is None else matrix.stride(0), to.rows if isinstance(to, LogitBuffer) else None
    )


def _of_topk(pair: Pair, made: Mapping[int, JsdLogits], first: int, tiles: int, **more: Any) -> dict[str, Any]:
    """Arguments of both kernels of a top-k teacher."""
    assert pair.topk is not None
    student = {**pair.given, **made}[0]
    return {
        **pair.vectors.known,
        "student": student,
        "stats": pair.stats,
        "ids": pair.topk,
        "first": first,
        "tiles": tiles,
        "tile_rows": 0 if student.largest is None else len(student.largest),
        "T": pair.call.number,
        "V": pair.call.size,
        "K": pair.topk.shape[1],
        "inverse_temperature": 1 / pair.call.options.temperature,
        "TILES": _TILES,
        **more,
    }


def topk_log_probs(pair: Pair, made: Mapping[int, JsdLogits], first: int, tokens: int, found: Tensor) -> Launch:
    """What the student gives the K entries, and the others together, into `found`, given its softmax in `stats`."""
    tail = pair.call.topk_rest == "tail"
    arguments = _of_topk(pair, made, first, pair.tiles, found=found, TAIL=tail, BLOCK=32)
    return Launch(topk_kernels.topk_log_probs, (tokens,), arguments, _WARPS)


def topk_numbers(pair: Pair, first: int, tokens: int, found: Tensor, loss: Tensor) -> Launch:
    """The losses by token, and `pair.numbers`, given what `topk_log_probs` found."""
    call, options = pair.call, pair.call.options
    assert call.indices is not None
    assert call.values is not None
    count = call.indices.shape[-1]
    of_logits = call.topk_kind == "logits"
    arguments = {
        **pair.vectors.known,
        "stats": pair.stats,
        "found": found,
        "indices": call.indices.view(-1, count),
        "values": call.values.view(-1, count),
        "numbers": pair.numbers,
        "loss": loss,
        "token_weight": setup.flat(call.token_weight),
        "first": first,
        "T": call.number,
        "K": count,
        "vocab": call.vocab,
        "most": torch.finfo(torch.float32).max if of_logits else most_log_prob(torch.finfo(call.values.dtype).eps),
        "scale": 1 / options.temperature if of_logits else 1.0,
        "beta": options.beta,
        "inverse_temperature": 1 / options.temperature,
        "soft_weight": options.soft_factor,
        "hard_weight": options.hard_weight,
        "REST": topk_kernels.RESTS[call.topk_rest].value,
        "MODE": _mode(options.beta),
        "HARD": options.hard_weight > 0,
        "SCALED": call.dtypes[0] == torch.float16,
        "BLOCK": 128,
    }
    return Launch(topk_kernels.topk_numbers, (tokens,), arguments, 1)


def topk_gradients(
    pair: Pair,
    made: Mapping[int, JsdLogits],
    first: int,
    tokens: int,
    first_tile: int,
    tiles: int,
    into: Mapping[int, LogitBuffer | Tensor],
    row_scale: Tensor | None = None,
) -> Launch:
    """The logits' gradients from `pair.numbers`, with arguments as those of `divergence`."""
    options, pad = pair.call.options, TOKEN_TILE if pair.sides else 1
    arguments = _of_topk(
        pair, made, first, tiles, gradient=_gradient_in(into[0]), numbers=pair.numbers, row_scale=row_scale,
        first_tile=first_tile, soft_weight=options.soft_factor, hard_weight=options.hard_weight,
        HARD=options.hard_weight > 0, SCALED=pair.call.dtypes[0] == torch.float16, PAD=pad,
    )  # fmt: skip
    return Launch(topk_kernels.topk_gradients, (pair.padded(tokens),), arguments, _WARPS)
