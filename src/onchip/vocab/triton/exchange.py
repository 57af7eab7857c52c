"""What ranks that share a vocabulary exchange while forward walks over chunks of tokens.

Forward keeps a chunk's exponentials relative to a shift that this rank chose, so hidden's gradient is right up to a
factor for each token: this shard's share of its softmax, exp(lse_r - lse).  One all-gather of each token's lse_r and of
its target's log-probability tells every rank the whole softmax.  It runs during the chunk's first product and ends
before the weight's, whose rows have that factor.  So no logits are computed twice, and none are kept until backward.

Every rank must take part in each exchange, so they all make the same plan (`Shards.most`).
"""

from typing import Any

import torch
from torch import Tensor

from onchip.core.sizes import up
from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_parallel import Shards
from onchip.vocab.torch import parallel
from onchip.vocab.torch.call import Layer
from onchip.vocab.triton import launches, vectors
from onchip.vocab.triton.products import Products
from onchip.vocab.triton.records import PositionTerms, Run, TokenSoftmax
from onchip.vocab.triton.setup import Gradients
from onchip.vocab.triton.tiling import VECTOR

# Numbers of a rank in front of its tokens': where its shard begins, and how many rows it has.
HEADER = VECTOR


class _Collective:
    """A collective that has begun.  It holds no tensor: a prepared call begins it again with others."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._work: Any = None

    def gather(self, mine: Tensor, out: Tensor) -> None:
        self._work = parallel.begin_gather(self._shards, mine, out)

    def sum(self, gradient: Tensor) -> Tensor:
        out, self._work = parallel.begin_sum(self._shards, gradient)
        return out

    def wait(self, *_: Tensor) -> None:
        """Wait until it is done, given what it reads and writes, which lives until then."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()


class HiddenSum:
    """The sum over ranks of hidden's gradient, for all tokens, in its own dtype and, if hidden states are replicated,
    in its own memory; begun while other work goes on.
    """

    def __init__(self, shards: Shards) -> None:
        self._collective = _Collective(shards)

    def apart(self, grads: Gradients) -> Gradients:
        """The gradients with memory of its own for hidden's: not that of hidden's rows, which the weight's products
        read.
        """
        return grads if grads.hidden is None else grads._replace(hidden=stated.empty_like(grads.hidden))

    def begin_with(self, products: Products, layer: Layer, terms: PositionTerms | None = None) -> None:
        """Make hidden's gradient, and begin."""
        if products.grads.hidden is not None:
            products.finish(terms)
            self.begin(products.grads.hidden.view(layer.hidden.shape))

    def complete(self, grads: Gradients, layer: Layer) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of hidden, weight and bias that are in no memory of forward's or of the caller's."""
        _, weight, bias = grads.made(layer.dtypes[2])
        if grads.hidden is None:
            return None, weight, bias
        if layer.number == 0:
            self.begin(grads.hidden.view(layer.hidden.shape))
        return self.wait(), weight, bias

    def begin(self, gradient: Tensor) -> None:
        self._given, self._out = gradient, stated.call(self._collective.sum, gradient)

    def wait(self) -> Tensor:
        """Wait; returns the sum for this rank's tokens."""
        stated.call(self._collective.wait, self._given, self._out)
        return self._out


class ShardExchange:
    """The exchange about tokens with these ids, [T] int64, as the whole vocabulary numbers them, and weights [T]
    float32.
    """

    def __init__(self, shards: Shards, ids: Tensor, token_weight: Tensor | None) -> None:
        self._shards, self._ids, self._token_weight = shards, ids, token_weight
        self._collective = _Collective(shards)
        tokens, device = len(ids), ids.device
        each = up(tokens, VECTOR)
        self._mine = stated.empty(HEADER + 2 * each, torch.float32, device)
        self._all = stated.empty((shards.ranks, HEADER + 2 * each), torch.float32, device)
        self.lse, self.log_prob = (self._mine[HEADER + i * each :][:tokens] for i in (0, 1))
        """This shard's statistics, [T], which forward fills in."""
        lse, log_prob, loss, self.share = (stated.empty(tokens, torch.float32, device) for _ in range(4))
        self.known = TokenSoftmax(lse, log_prob[:, None], loss=loss)
        """The whole softmax, for the tokens of the chunks so far; its loss is right if there is no smoothing."""
        # share: [T] float32: of the whole softmax, this shard's
        self.sum = HiddenSum(shards)
        self._weight_sum: Tensor | None = None

    @property
    def header(self) -> Tensor:
        """[2] int32: where this shard begins, and how many rows it has; to be filled in first."""
        return self._mine[:2].view(torch.int32)

    def begin(self) -> None:
        """Send what is known about this shard, once a chunk's softmax is made."""
        stated.call(self._collective.gather, self._mine, self._all)

    def combine(self, run: Run) -> TokenSoftmax:
        """Combine what all shards sent, once it has come."""
        stated.call(self._collective.wait, self._mine, self._all)
        shards, tokens = self._shards, len(self._ids)
        if tokens > 0:
            run.launch(
                vectors.combine_shards,
                (-(-tokens // 256),),
                gathered=self._all,
                stride=self._all.shape[1],
                ids=self._ids,
                token_weight=self._token_weight,
                known=self.known,
                share=self.share,
                T=tokens,
                ranks=shards.ranks,
                rank=shards.start // shards.most,
                most=shards.most,
                vocab=shards.vocab,
                HEADER=HEADER,
                BLOCK=256,
            ).run()
        return self.known

    def weight_sum(self, run: Run) -> Tensor:
        """[H] float32: the sum of this shard's rows of the weight."""
        if self._weight_sum is None:
            self._weight_sum = launches.column_sums(run, run.weight)
        return self._weight_sum
