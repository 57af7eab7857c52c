"""A head and a loss with the Triton kernels: what is launched, in which order, on what memory.

`forward` computes the log-probabilities of each token's ids.  If gradients are wanted, it leaves the hidden states by
position, and exponentials, from which `backward` makes them.  A cross-entropy is a function of one id's log-probability
and of lse.  If exponentials are kept, those of all ids are zeroed, and their entries are added to the gradients in
float32.  If the entropy has an upstream gradient, what was kept is turned into the logits' gradient, in place, before
the products.

By another plan, `forward` takes the tokens in chunks and computes the gradients of each, up to factors; `backward`
multiplies and rounds them.

Nothing here waits for the device: only the kernels know how many tokens are not ignored.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.sizes import up
from onchip.frontend import torch_prepared as stated
from onchip.kernels.triton.launch import Launch
from onchip.vocab.torch.call import LinearCall
from onchip.vocab.torch.softmax import Asked
from onchip.vocab.triton import gradients, launches, setup, softmax, vectors
from onchip.vocab.triton import sums as sum_kernels
from onchip.vocab.triton.exchange import HiddenSum, ShardExchange
from onchip.vocab.triton.memory import PAIRS, TritonPlan, rounds_in_forward
from onchip.vocab.triton.products import Products, chunks, float16_scale
from onchip.vocab.triton.records import (
    BLOCK,
    TOKEN_TILE,
    VOCAB_TILE,
    ChunkSums,
    End,
    LogitBuffer,
    Partials,
    Picked,
    PositionTerms,
    Run,
    Sum,
    TokenSoftmax,
)
from onchip.vocab.triton.setup import Gradients, Sums, TritonSaved
from onchip.vocab.triton.tiling import VECTOR, chunk_hidden
from onchip.vocab.triton.token_launches import compact, keep_hidden, scale_hidden, shard_rows

# Labels that are sorted by one kernel: on an H100 8192 took 0.04 ms, 16384 0.10 and 32768 0.37, where PyTorch takes
# 0.05 and the host 0.16 more.
MOST_COUNTED = 8192
# Programs that go through rows of the weight's gradient: enough to fill any device, and few to find nothing to do.
MOST_PROGRAMS = 4096


class OutputGradients(NamedTuple):
    """The upstream gradients, by token; None stands for 0."""

    log_prob: Tensor | None  # [T, K] float32
    lse: Tensor | None = None  # [T] float32
    entropy: Tensor | None = None  # [T] float32
    even: Tensor | None = None  # [T] float32: of all entries, times their class weights
    rest: Tensor | None = None  # [T, K] float32: of the ids' own entries beside


class ForwardMemory(NamedTuple):
    """What forward fills in and uses up, for one chunk of tokens after another."""

    rows: Tensor  # [tokens, H] of hidden, by position
    kept: LogitBuffer | None
    partials: Partials
    chunk: setup.TokenChunk | None  # where it computes gradients

    @staticmethod
    def empty(
        run: Run, call: LinearCall, config: TritonPlan, saved: TritonSaved, asked: Asked, tokens: int, *, first: bool
    ) -> "ForwardMemory":
        """For at most `tokens` tokens; `first`: memory for the first chunk."""
        chunk = setup.TokenChunk.empty(call, config, saved, tokens, first=first) if config.in_forward else None
        rows, kept = setup.rows_and_buffer(call, config, saved) if chunk is None else (chunk.rows, chunk.buffer)
        columns, work = launches.partial_columns(run, asked), None if chunk is None else chunk.work
        partials = Partials.empty(run.vocab, len(rows), rows.device, asked, columns=columns, memory=work)
        return ForwardMemory(rows, kept, partials, chunk)


# ------------------------------------------------------------------------------------------------------------ forward


def forward(
    run: Run,
    call: LinearCall,
    config: TritonPlan,
    saved: TritonSaved,
    *,
    asked: Asked,
    token_weight: Tensor | None = None,  # [T] float32
    divisor: Callable[[], Tensor | None] = lambda: None,  # of the loss: [] float32, once it is known which tokens count
    losses: bool = False,  # whether they are made; with the entropy, what is correct as well
    exchange: ShardExchange | None = None,  # with the ranks that have the rest of the vocabulary
) -> TokenSoftmax:
    """The log-probabilities of each token's ids, lse, and what is asked for; with the entropy, top1 too.

    If gradients are wanted, `saved` is filled for backward.  If the plan is to compute the weight's gradient here, it
    is that of the sum of the losses with this `token_weight` or, if `rounds_in_forward`, of the loss.  With an
    `exchange`, hidden's gradient is that of the loss, rounded, and its sum over the ranks begins.
    """
    ids = _ids(call)
    (tokens, k), device = ids.shape, ids.device
    smoothing, ignore_index = call.options.label_smoothing > 0, call.options.ignore_index

    def empty(*more: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return stated.empty((tokens, *more), dtype, device)

    def zeros() -> Tensor:
        """0 for ignored tokens; each call makes its own, since an operator's outputs must not share memory."""
        return stated.zeros(tokens, torch.float32, device)

    def outputs() -> TokenSoftmax:
        leading = zeros() if exchange is None else exchange.log_prob
        return TokenSoftmax(
            zeros() if exchange is None else exchange.lse,
            leading[:, None] if k == 1 else empty(k),
            zeros() if asked.entropy else None,
            leading,
            zeros() if smoothing else None,
            stated.call(torch.full, (tokens,), -1, dtype=torch.int64, device=device) if asked.entropy else None,
            zeros() if asked.mean_logits else None,
            zeros() if asked.sum_sq else None,
            zeros() if asked.top else None,
            zeros() if losses else None,
            stated.zeros(tokens, torch.bool, device) if losses and asked.entropy else None,
        )

    stated.zero(run.vectors.packed)
    if exchange is not None and call.grads[0]:
        stated.zero(saved.hidden_memory)  # of tokens that are ignored
    if tokens == 0:
        return outputs()
    made: TokenSoftmax | None = None
    temperature = call.token_temperature
    if temperature is not None:
        temperature = setup.flat(temperature.expand(call.hidden.shape[:-1]))
    hidden = call.hidden.reshape(tokens, run.hidden)
    picked = Picked(empty(), *((None, None) if k == 1 else (empty(k), empty(k, dtype=torch.int32))))
    sums = asked._replace(mean_logits=asked.mean_logits or smoothing)
    sizes, memory = config.token_chunks(tokens), None
    target, ignored = (ids, ignore_index) if k == 1 else (stated.call(_any_counts, ids, ignore_index), 0)
    numbers: Tensor | None = None
    if len(sizes) > 1 or config.in_forward:
        numbers = stated.empty((len(sizes) + 1, VECTOR), torch.int32, device)
    compact(run.vectors, target, ignored, numbers, sizes).run()
    rounds = config.in_forward and rounds_in_forward(setup.problem_of(call))
    by = divisor() if config.in_forward and (call.grads[1] or exchange is not None) else None
    found: tuple[OutputGradients, Tensor] | None = None

    def told() -> tuple[TokenSoftmax, OutputGradients, Tensor]:
        """The softmax of the tokens so far, and the gradients with respect to the sum of the losses."""
        nonlocal found
        assert made is not None
        known = made if exchange is None else exchange.combine(run)
        if found is None or run.loss_terms.of_lse:  # that of z-loss follows from lse
            # What the last chunk rounds is divided by what the loss is.
            by_mean = run.options.reduction == "mean"
            found = loss_gradients(run, known, None, by, token_weight, by_mean=by_mean)
        return known, *found

    for i, (last, size) in enumerate(zip(accumulate(sizes), sizes, strict=True)):
        first = last - size
        if memory is None or (i == 1 and config.first_chunk):
            memory = None  # given back before that of the other chunks is taken
            memory = ForwardMemory.empty(run, call, config, saved, sums, size, first=i == 0)
        launches.gather(run, hidden, ids, ignore_index, temperature, picked, memory.rows, first).run()
        launches.softmax(run, memory.rows, memory.partials, memory.kept, first).run()
        made = made or outputs()  # while the device is busy
        part = run if numbers is None else run.part(first, last, numbers[i, :1])
        part.launch(
            softmax.merge_tiles,
            (-(-part.tokens // 16),),
            warps=8,
            target_logit=picked.target_logit[first:],
            token_weight=token_weight,
            partials=memory.partials,
            tiles=len(memory.partials.maximum),
            out=made,
            normalizer=empty() if memory.chunk is None else memory.chunk.normalizer,
            BLOCK_T=16,
            BLOCK=256,
        ).run()
        if exchange is not None:
            exchange.begin()
        if memory.kept is not None:
            part.launch(
                softmax.rebase_exponentials,
                (-(-run.vocab_tiles // 16), memory.kept.kept // TOKEN_TILE),
                warps=8,
                **memory.kept.known,
                partials=memory.partials,
                TILES=16,
                COLUMNS=memory.partials.columns,
                BLOCK_T=TOKEN_TILE,
            ).run()
            if picked.label is not None:
                label = picked.label[first:last]
                launches.write(part, memory.kept, label, None, (0, memory.kept.kept), 0, run.vocab_tiles).run()
            if memory.chunk is not None:
                assert numbers is not None
                following, out = numbers[i + 1, :1] if rounds else None, saved.hidden_memory
                ends = {"last": last == tokens, "add": first > 0}
                _chunk_gradients(part, call, memory.chunk, told, following, exchange, out, **ends)
    assert made is not None
    if picked.label is not None:
        run.launch(
            softmax.spread_log_probs,
            (-(-ids.numel() // BLOCK),),
            picked=picked,
            out=made,
            ids=ids,
            ignore_index=ignore_index,
            N=ids.numel(),
            K=k,
            BLOCK=BLOCK,
        ).run()
    return made


Told = Callable[[], tuple[TokenSoftmax, OutputGradients, Tensor]]


def _chunk_gradients(
    part: Run,
    call: LinearCall,
    chunk: setup.TokenChunk,
    told: Told,
    following: Tensor | None,  # [1] int32: tokens of the next chunk, where the last one is to be rounded
    exchange: ShardExchange | None,
    out: Tensor,  # hidden's gradient, with an exchange
    *,
    last: bool,
    add: bool,
) -> None:
    """Make the gradients of a chunk of tokens, up to factors, from its exponentials; the weight's is added to the
    previous chunks'.
    """
    if exchange is not None:
        terms, factor = _chunk_of_shard(part, call, chunk, told, exchange, out)
        if call.grads[0] and last:
            exchange.sum.begin(out)
    else:
        if call.grads[1]:
            known, upstream, factor = told()
        for sums in _hidden_sums(part, call, chunk):
            keep_hidden(part, call, sums, chunk.left.hidden).run()
        if call.grads[1]:
            terms = position_terms(part, _ids(call), call.options.ignore_index, known, upstream, part.tokens)
    if call.grads[1]:
        _chunk_weight(part, chunk, terms, None if following is None else End(factor, following), add=add)


def _hidden_sums(part: Run, call: LinearCall, chunk: setup.TokenChunk) -> Iterator[ChunkSums]:
    """Hidden's gradient of a chunk's tokens, up to factors, from its exponentials, some positions at a time."""
    if not call.grads[0]:
        return
    memory = chunk.work[: len(chunk.work) // (4 * part.hidden) * 4 * part.hidden].view(torch.float32)
    memory, normalizer = memory.view(-1, part.hidden), chunk.normalizer[: part.tokens]
    for first, number in chunks(0, part.tokens, chunk.hidden_step):
        apart, slices = chunk_hidden(number, part.hidden, len(memory))
        sums, positions = stated.zero(memory[: slices * number]), (first, first + number)
        launches.hidden_product(
            part, chunk.buffer, normalizer, sums, False, 0, part.vocab_tiles, apart=apart, slices=slices,
            positions=positions,
        ).run()  # fmt: skip
        yield ChunkSums(sums, first, number, slices)


def _chunk_of_shard(
    part: Run, call: LinearCall, chunk: setup.TokenChunk, told: Told, exchange: ShardExchange, out: Tensor
) -> tuple[PositionTerms, Tensor]:
    """Make this shard's part of hidden's gradient, in `out`.  `told` is called after the first product, during which
    ranks exchange what it returns.
    """

    def know() -> tuple[PositionTerms, Tensor]:
        known, upstream, factor = told()
        return position_terms(part, _ids(call), call.options.ignore_index, known, upstream, part.tokens), factor

    found = None
    for sums in _hidden_sums(part, call, chunk):
        found = found or know()
        terms, factor = found
        weight_sum = None if terms.even is None else exchange.weight_sum(part)
        shard_rows(part, call.weight, sums, terms, exchange.share, weight_sum, factor, out).run()
    return found or know()


def _chunk_weight(part: Run, chunk: setup.TokenChunk, terms: PositionTerms, end: End | None, *, add: bool) -> None:
    """Make the weight's gradient from a chunk's exponentials, which it uses up; it is added to the previous chunks'."""
    rows, tiles = chunk.rows[: part.tokens], part.vocab_tiles
    even_sum = None if terms.even is None else launches.column_sums(part, rows, terms.even)
    part.launch(
        gradients.scale_rows, (part.tokens,), rows=chunk.rows, kept=part.tokens,
        product_scale=terms.product_scale, BLOCK=BLOCK,
        swap=int(launches.swaps_columns(part)),
    ).run()  # fmt: skip
    inverse, into = terms.inverse_grad_scale, chunk.left.weight
    product = launches.add_weight(part, chunk.buffer, rows, into, inverse, even_sum, 0, tiles, add=add, end=end)
    product = product.fixed()
    for start, number in chunks(0, tiles, chunk.weight_tiles):
        product.again(first_tile=start, chunk_tiles=number).run()


def _ids(call: LinearCall) -> Tensor:
    """The ids, [T, K] int64."""
    ids, shape = call.ids, (call.number, call.several)
    if ids.dtype == torch.int64 and ids.is_contiguous():
        return ids.view(shape)
    return stated.converted(call.ids, lambda ids: ids.reshape(shape).to(torch.int64).contiguous())


def _any_counts(ids: Tensor, ignore_index: int) -> Tensor:
    return (ids != ignore_index).any(1).to(torch.int64)


def loss_gradients(
    run: Run,
    known: TokenSoftmax,
    grad_loss: Tensor | None,
    divisor: Tensor | None,
    token_weight: Tensor | None,
    *,
    mean: bool = False,
    by_mean: bool = False,
) -> tuple[OutputGradients, Tensor]:
    """The gradients with respect to log-probability and lse, given that with respect to the loss (None: 1); and the one
    with respect to the sum of the losses, [] float32.  `mean`: the loss is their mean; `by_mean`: the same for the
    latter.
    """
    given = grad_loss is not None
    flat = known.lse if grad_loss is None else grad_loss.reshape(-1)
    apart, tokens = run.options.reduction == "none", len(known.lse)

    def vector(wanted: bool) -> Tensor | None:
        return stated.empty_like(known.lse) if wanted else None

    weighed = run.class_weight is not None and run.options.label_smoothing > 0
    made = OutputGradients(
        stated.empty_like(known.log_prob), vector(run.loss_terms.of_lse), None, vector(weighed), vector(weighed)
    )
    of_sum = stated.empty((), torch.float32, known.lse.device)
    if tokens > 0:
        run.launch(
            vectors.loss_gradients,
            (-(-tokens // 256),),
            T=tokens,
            grad_loss=flat,
            grad_stride=flat.stride(0) if given and apart else 0,
            divisor=divisor,
            token_weight=token_weight,
            lse=known.lse,
            upstream=made,
            of_sum=of_sum,
            given=int(given),
            mean=int(mean),
            mean_of_sum=int(by_mean),
            BLOCK=256,
        ).run()
    return made, of_sum


# ----------------------------------------------------------------------------------------------------------- backward


def backward(
    run: Run,
    call: LinearCall,
    config: TritonPlan,
    saved: TritonSaved,
    known: TokenSoftmax,
    upstream: OutputGradients,
    wanted: Sequence[bool],
    *,
    add_to: Tensor | None = None,
    factor: Tensor | None = None,  # [] float32
    hidden_sum: HiddenSum | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Turn `saved` into the gradients of hidden and weight, and return the gradients that are in none of its memory:
    the bias's, and the weight's if nothing was kept in its memory, unless that is added to `add_to`, [V, H] float32.
    `factor` is that of the weight's gradient if forward computed it.

    The vocabulary goes in chunks, of logits that are recomputed, and within these in chunks of the weight's gradient.

    If other ranks have other parts of the vocabulary, hidden's gradient is returned too: `hidden_sum` begins to sum it
    over all ranks as soon as it is there, during the weight's products.
    """
    tokens, grads = run.tokens, Gradients.of(call, saved, wanted, add_to)
    if hidden_sum is not None:
        grads = hidden_sum.apart(grads)
    if tokens > 0:
        ids = _ids(call)
        held = tokens if config.in_forward else config.kept
        terms = position_terms(run, ids, call.options.ignore_index, known, upstream, held)
        if config.in_forward:
            _scale_sums(run, call, saved, terms, grads, factor)
            return grads.made(call.dtypes[2])
        products = Products.of(
            run, call, config, saved, grads, terms.product_scale, terms.inverse_grad_scale, terms.even
        )
        buffer, kept = products.buffer, products.kept
        if kept > 0 and terms.entropy_scale is not None:
            grid = (run.vocab_tiles, buffer.kept // 32)
            run.launch(gradients.entropy_gradient, grid, **buffer.known, terms=terms, BLOCK_T=32).run()
        products.take_kept(scale=terms.entropy_scale is None)
        first = next(chunks(0, run.vocab_tiles, config.vocab_chunk // VOCAB_TILE))
        recomputed = launches.gradient(run, products.rows, terms, buffer, *first).fixed() if kept < tokens else None
        if recomputed is None and hidden_sum is not None:
            hidden_sum.begin_with(products, call, terms)
        for chunk in chunks(0, run.vocab_tiles, config.vocab_chunk // VOCAB_TILE):
            if recomputed is not None:
                recomputed.again(first_tile=chunk[0], chunk_tiles=chunk[1]).run()
                if terms.ids > 1:
                    label = terms.entry_label.view(ids.shape)
                    entry = terms.entry if kept == 0 else None  # where some are added to the results, all are
                    launches.write(run, buffer, label, entry, (kept, tokens), *chunk).run()
            products.take_hidden(*chunk)
            if recomputed is not None and hidden_sum is not None and sum(chunk) == run.vocab_tiles:
                hidden_sum.begin_with(products, call, terms)
            products.take_chunk(*chunk)
        if kept > 0 and (wanted[1] or wanted[2]):
            _target_terms(run, call.hidden.reshape(tokens, run.hidden), terms, grads.weight, grads.bias).run()
        if hidden_sum is None:
            products.finish(terms)
    return grads.made(call.dtypes[2]) if hidden_sum is None else hidden_sum.complete(grads, call)


def _scale_sums(
    run: Run, call: LinearCall, saved: TritonSaved, terms: PositionTerms, grads: Gradients, factor: Tensor | None
) -> None:
    """Make the gradients from what forward left of them."""
    sums = Sums.of(call, saved)
    if grads.weight is not None:
        rounded = rounds_in_forward(setup.problem_of(call))
        _scale_weight(run, sums.weight, grads.weight, factor, rounded=rounded, add=grads.add)
        _target_terms(run, call.hidden.reshape(run.tokens, run.hidden), terms, grads.weight, grads.bias).run()
    if grads.hidden is not None:
        weight_sum = None if terms.even is None else launches.column_sums(run, run.weight)
        scale_hidden(run, sums.hidden, terms, weight_sum, grads.hidden).run()


def _scale_weight(run: Run, left: Sum, out: Tensor, factor: Tensor | None, *, rounded: bool, add: bool) -> None:
    """Make the weight's gradient from its sum, which begins at the same place, or add it to the caller's."""
    paired = left.paired

    def scale(first: int, last: int, left: Sum) -> None:
        if paired:
            first, last = first // 2, up(last, PAIRS) // 2
        run.launch(
            sum_kernels.scale_weight,
            (min(last - first, MOST_PROGRAMS), -(-run.hidden // BLOCK)),
            left=left.first,
            digits=left.digits,
            out=out,
            factor=factor,
            first=first,
            last=last,
            PAIRED=paired,
            ROUNDED=rounded,
            ADD=add,
            BLOCK=BLOCK,
        ).run()

    last = run.vocab
    if out.dtype == torch.float32 and not add:
        # Twice as long as the first 16 bits: from the end on, by halves, what is written has been read.
        assert left.digits is not None
        left = left._replace(digits=stated.call(torch.clone, left.digits))
        while last > PAIRS:
            first = up(-(-last // 2), PAIRS)
            scale(first, last, left)
            last = first
        left = left._replace(first=stated.call(torch.clone, left.first[:last]))
    scale(0, last, left)


def _target_terms(
    run: Run, hidden: Tensor, terms: PositionTerms, grad_weight: Tensor | None, grad_bias: Tensor | None
) -> Launch:
    """The launch that adds the targets of each vocabulary entry together, for what is kept."""
    number = len(terms.entry_label)
    labels, positions = _sorted_labels(run, terms)
    return run.launch(
        gradients.add_targets,
        (number, 1 if grad_weight is None else -(-run.hidden // BLOCK)),
        hidden=hidden,
        hidden_stride_t=hidden.stride(0),
        hidden_stride_h=hidden.stride(1),
        grad_weight=grad_weight,
        grad_bias=grad_bias,
        sorted_label=labels,
        sorted_position=positions,
        at_target=terms.entry,
        inverse_grad_scale=terms.inverse_grad_scale,
        N=number,
        IDS=terms.ids,
        TOKENS=4,  # with 16 it took 0.63 ms instead of 0.04 at T4096 H4096 on an H100
        BLOCK=BLOCK,
    )


def _sorted_labels(run: Run, terms: PositionTerms) -> tuple[Tensor, Tensor]:
    """The labels of all ids in ascending order, with NO_LABEL for those that don't count, and where each comes from."""
    label = terms.entry_label
    counts = len(label) <= MOST_COUNTED
    packed = stated.empty((2, up(len(label), VECTOR)), torch.int32, label.device)
    labels, positions = packed[:, : len(label)]
    run.launch(
        vectors.sort_labels,
        (-(-len(label) // 32),),
        label=label,
        sorted_label=labels,
        sorted_position=positions,
        N=len(label),
        sorts=int(counts),
        IDS=terms.ids,
        BLOCK=32,
        OTHERS=256,
    ).run()
    if not counts and not labels.is_meta:  # where PyTorch would import SymPy
        labels, by = stated.call(torch.sort, labels, stable=True)
        positions = stated.call(Tensor.to, by, torch.int32)
    return labels, positions


def position_terms(
    run: Run, ids: Tensor, ignore_index: int, known: TokenSoftmax, upstream: OutputGradients, kept: int
) -> PositionTerms:
    """What the gradients of the positions' logits are made from; the exponentials of the first `kept` positions are
    kept.
    """
    tokens = run.tokens
    sizes = [tokens] * 4 + [tokens * ids.shape[1]] + [tokens] * 3
    padded = [up(size, VECTOR) for size in sizes]
    packed = stated.empty(sum(padded), torch.float32, known.lse.device)
    row_scale, product_scale, even, entropy_scale, entry, lse, mean, size = (
        x[:size] for x, size in zip(packed.split_with_sizes(padded), sizes, strict=True)
    )
    entry_label = stated.empty(tokens * ids.shape[1], torch.int32, ids.device)
    entropy = upstream.entropy is not None
    terms = PositionTerms(
        row_scale,
        even if run.options.label_smoothing > 0 else None,
        entropy_scale if entropy else None,
        mean if entropy else None,
        product_scale,
        lse,
        entry,
        entry_label,
        None,
    )
    block_k = 1
    while block_k < min(ids.shape[1], 32):
        block_k *= 2
    block_t = 256 // block_k
    run.launch(
        gradients.position_terms,
        (-(-tokens // block_t), -(-ids.shape[1] // block_k)),
        known=TokenSoftmax(known.lse, known.log_prob, known.entropy),
        upstream=upstream,
        terms=terms,
        size=size,
        ids=ids,
        K=ids.shape[1],
        ignore_index=ignore_index,
        elsewhere=ignore_index if run.elsewhere is None else run.elsewhere,
        classes=run.vocab if run.whole_vocab is None else run.whole_vocab,
        slope_scale=run.options.logit_scale / run.outer_scale,
        kept=kept,
        BLOCK_T=block_t,
        BLOCK_K=block_k,
    ).run()
    grad_scale = float16_scale(size, run.vectors, run.dtype)
    if grad_scale is not None:
        stated.call(Tensor.mul_, packed[: sum(padded[:5])], grad_scale)
        terms = terms._replace(inverse_grad_scale=stated.call(torch.reciprocal, grad_scale))
    return terms._replace(product_scale=stated.call(torch.ones_like, lse)) if entropy else terms
