"""Train a small causal language model on the bytes of English text, on one process or several.

    python docs/guides/train.py
    torchrun --nproc-per-node 2 docs/guides/train.py ddp
    torchrun --nproc-per-node 2 docs/guides/train.py fsdp

All three print the same losses: the processes share each micro-batch out among them.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from onchip.torch import LMHead

VOCAB, HIDDEN, LENGTH, SEQUENCES, MICRO_BATCHES = 256, 64, 64, 8, 2


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.feed = nn.Sequential(
            nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.feed(x)


class Model(nn.Module):
    """With labels it gives their loss, without them the logits."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCAB, HIDDEN), nn.LayerNorm(HIDDEN)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.lm_head = LMHead(HIDDEN, VOCAB, bias=False, z_loss=1e-4)

    def forward(self, ids, labels=None, **options):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x), labels, **options)


def shard(model):
    """FSDP2: each block, and the norm together with the head, is gathered when it is called."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard([model.norm, model.lm_head], reshard_after_forward=False)
    return fully_shard(model)


def steps(number):
    """Of [micro-batches, sequences, length] bytes each."""
    from pydoc_data.topics import topics

    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    size = MICRO_BATCHES * SEQUENCES * LENGTH
    return text[: number * size].view(number, MICRO_BATCHES, SEQUENCES, LENGTH)


def train(model, number=10, rank=0, ranks=1):
    """The loss of each step, over all processes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in steps(number):
        mine = step[:, rank::ranks]
        labels = mine.masked_fill(mine == ord("\n"), -100)  # say, to learn no line breaks
        count, total = (labels[..., 1:] != -100).sum(), torch.zeros(())
        if ranks > 1:
            dist.all_reduce(count)
        for ids, y in zip(mine, labels, strict=True):
            loss = model(ids, y, normalizer=count)
            (ranks * loss).backward()  # gradients are averaged over processes, where their sum is wanted
            total += loss.detach()
        if ranks > 1:
            dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def main():
    """Print the losses."""
    parallel = sys.argv[1] if len(sys.argv) > 1 else None
    torch.manual_seed(0)
    model: torch.nn.Module = Model()
    rank, ranks = 0, 1
    if parallel is not None:
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        model = shard(model) if parallel == "fsdp" else DistributedDataParallel(model)
    losses = train(model, rank=rank, ranks=ranks)
    if rank == 0:
        print(*(f"{loss:.4f}" for loss in losses), flush=True)
    if parallel is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
