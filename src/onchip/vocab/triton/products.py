"""The products that make a layer's gradients from its logits' gradient with the Triton kernels; the walks of several
losses share them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from onchip.core.sizes import up
from onchip.frontend import torch_prepared as stated
from onchip.kernels.triton.launch import Launch
from onchip.vocab.torch.call import Layer
from onchip.vocab.torch.softmax import FLOAT16_ROW
from onchip.vocab.triton import gradients, launches, setup
from onchip.vocab.triton.memory import TritonPlan
from onchip.vocab.triton.records import BLOCK, TOKEN_TILE, VOCAB_TILE, LogitBuffer, PositionTerms, Run, Sum, Vectors
from onchip.vocab.triton.setup import Gradients, TritonSaved
from onchip.vocab.triton.token_launches import finish_hidden


def float16_scale(size: Tensor, vectors: Vectors, dtype: torch.dtype, largest: float = FLOAT16_ROW) -> Tensor | None:
    """The factor that brings the largest of the positions' rows, of these sizes, into float16's range; None if they
    need none.
    """
    if dtype != torch.float16 or size.numel() == 0:
        return None
    return stated.call(_scale_of, size, vectors.number, largest)


def _scale_of(size: Tensor, number: Tensor, largest: float) -> Tensor:
    there = torch.arange(size.numel(), dtype=torch.int64, device=size.device) < number
    found = torch.where(there, size.abs().nan_to_num(nan=0), 0).amax()
    return torch.where(found > 0, largest / found, 1)


def chunks(first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
    """The first number, and how many there are, in each chunk."""
    return ((start, min(size, last - start)) for start in range(first, last, max(1, size)))


@dataclass(frozen=True)
class Products:
    """The products that make a layer's gradients from its logits' gradient, in `buffer`."""

    run: Run
    weight: Tensor  # the caller's
    grads: Gradients  # out; the weight's memory may be the buffer's, if that begins a chunk further on
    config: TritonPlan
    buffer: LogitBuffer
    rows: Tensor  # [T, H] by position, for the products to use up
    sums: Tensor | None  # [T or more, H] float32 zeros: hidden's gradient by position
    product_scale: Tensor  # [T] float32: what multiplies that of the positions that are kept
    inverse_grad_scale: Tensor | None  # [] float32
    even: Tensor | None = None  # [T] float32: what each entry lacks of the positions that are kept

    @staticmethod
    def of(
        run: Run,
        layer: Layer,
        config: TritonPlan,
        saved: TritonSaved,
        grads: Gradients,
        product_scale: Tensor,
        inverse_grad_scale: Tensor | None,
        even: Tensor | None = None,
    ) -> "Products":
        """The products for what forward left in `saved`, with memory for what is recomputed."""
        rows = setup.position_rows(layer, saved)
        recomputed = max(0, up(run.tokens, TOKEN_TILE) - config.kept)
        buffer = setup.logit_buffer(layer, config, saved, recomputed)
        sums = None
        if grads.hidden is not None:
            size = min(config.kept, run.tokens) + 2 * recomputed if config.halves else run.tokens
            sums = stated.zeros((size, run.hidden), torch.float32, rows.device)
        even = even if buffer.kept > 0 else None
        return Products(run, layer.weight, grads, config, buffer, rows, sums, product_scale, inverse_grad_scale, even)

    @property
    def kept(self) -> int:
        return min(self.buffer.kept, self.run.tokens)

    @cached_property
    def even_sum(self) -> Tensor | None:
        """[H] float32: what every row of the weight's gradient lacks; needed before `take_kept`."""
        if self.even is None or self.grads.weight is None:
            return None
        return launches.column_sums(self.run, self.rows[: self.kept], self.even)

    def take_kept(self, *, scale: bool = True) -> None:
        """Do what must come before the weight's gradient replaces what is kept."""
        if self.kept > 0 and scale:
            _ = self.even_sum  # of the rows as they are
            self.run.launch(
                gradients.scale_rows, (self.run.tokens,), rows=self.rows, kept=self.kept,
                product_scale=self.product_scale, BLOCK=BLOCK, swap=0,
            ).run()  # fmt: skip
        if self.kept > 0 and self.sums is not None:
            tiles = self.run.vocab_tiles
            product = launches.hidden_product(
                self.run, self.buffer, self.product_scale, self.sums, False, 0, tiles, positions=(0, self.kept)
            )
            product.run()

    def take_hidden(self, first: int, tiles: int) -> None:
        """Make hidden's part of a chunk of the vocabulary that is recomputed."""
        if self.kept < self.run.tokens and self.sums is not None:
            self._recomputed_product.again(first_tile=first, chunk_tiles=tiles).run()

    def take_chunk(self, first: int, tiles: int) -> None:
        """Make the other gradients' parts of a chunk of the vocabulary, with what is recomputed of it."""
        run, buffer, inverse = self.run, self.buffer, self.inverse_grad_scale
        if self.grads.bias is not None:
            run.launch(
                gradients.bias_gradient,
                (tiles, VOCAB_TILE // 64),
                **buffer.known,
                product_scale=self.product_scale,
                even=self.even,
                inverse_grad_scale=inverse,
                out=self.grads.bias,
                first_tile=first,
                BLOCK_T=64,
                BLOCK_V=64,
            ).run()
        if self.grads.weight is not None:
            for start, number in chunks(first, first + tiles, self.config.weight_chunk // VOCAB_TILE):
                self._weight_product.again(recomputed_from=first, first_tile=start, chunk_tiles=number).run()

    @cached_property
    def _recomputed_product(self) -> Launch:
        """A launch for `again`, for no chunk yet."""
        assert self.sums is not None
        return launches.hidden_product(
            self.run, self.buffer, self.product_scale, self.sums, self.config.halves, 0, 0
        ).fixed()

    @cached_property
    def _weight_product(self) -> Launch:
        """A launch for `again`, for no chunk yet."""
        assert self.grads.weight is not None
        out, inverse = self.grads.weight[: self.run.vocab], self.inverse_grad_scale
        made = launches.weight_product(
            self.run, self.buffer, self.rows, Sum(out), inverse, self.even_sum, 0, 0, 0, add=self.grads.add
        )
        return made.fixed()

    def finish(self, terms: PositionTerms | None = None) -> None:
        """Make hidden's gradient from its sums; with `terms`, add the ids' entries if any are kept."""
        if self.sums is None or self.grads.hidden is None:
            return
        finish_hidden(
            self.run,
            self.weight,
            self.sums,
            terms,
            None if self.even is None else launches.column_sums(self.run, self.run.weight),
            self.inverse_grad_scale,
            self.kept,
            self.buffer.rows.in_third if self.config.halves else 0,
            self.grads.hidden,
        ).run()
