"""A model under PyTorch's plan for tensor and sequence parallelism, against the same model in one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from all_cards import count, spawned
from onchip.integrations.parallelize import HeadParallel
from onchip.torch import LMHead, cross_entropy, linear_cross_entropy
from sharded import close, leaf, spawn

VOCAB, HIDDEN = 61, 16
TOKENS = Shard(1)


class Model(nn.Module):
    """Gives its hidden states, and with labels its head's loss of them."""

    def __init__(self, head=LMHead):
        super().__init__()
        torch.manual_seed(1)  # on the CPU, whose numbers are the same on each machine
        self.embedding, self.norm = nn.Embedding(VOCAB, HIDDEN), nn.RMSNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)
        self.lm_head = head(HIDDEN, VOCAB)
        self.to(device())

    def forward(self, ids, labels=None, **options):
        x = self.embedding(ids)
        hidden = self.norm(x + self.down(self.up(x).relu()))
        return hidden if labels is None else self.lm_head(hidden, labels, **options)


def device():
    """Where this process group's tensors are; outside of one the CPU."""
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


def planned(mesh, head, model=None):
    """The plan of torchtitan's Llama for PyTorch, with this style for the head."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=TOKENS, use_local_output=False),
        "up": ColwiseParallel(input_layouts=TOKENS, use_local_output=False),
        "down": RowwiseParallel(output_layouts=TOKENS, use_local_output=False),
        "norm": SequenceParallel(),
        "lm_head": head,
    }
    return parallelize_module(model or Model(), mesh, plan)


def batch(seed=0):
    ids = torch.randint(VOCAB, (3, 8), generator=torch.Generator().manual_seed(seed)).to(device())
    return ids, ids.masked_fill(ids % 5 == 0, -100)


COLUMNS = {"input_layouts": TOKENS, "output_layouts": Shard(-1), "use_local_output": False}
LOSSES = {
    "the head's": (HeadParallel, lambda m, ids, y: m(ids, y, softcap=5.0)),
    "by keyword": (HeadParallel, lambda m, ids, y: m.lm_head(m(ids), labels=y, softcap=5.0, return_stats=True)[0]),
    "of a plain hidden": (HeadParallel, lambda m, ids, y: m.lm_head(local(m(ids)), y, softcap=5.0)),
    "of its logits": (HeadParallel, lambda m, ids, y: of_logits(m.lm_head(m(ids)), y)),
    "of PyTorch's logits": (ColwiseParallel, lambda m, ids, y: of_logits(m.lm_head(m(ids)), y)),
    "of its weight": (
        ColwiseParallel,
        lambda m, ids, y: linear_cross_entropy(
            m(ids), m.lm_head.weight, y, m.lm_head.bias, shift=True, softcap=5.0
        ),
    ),
}  # fmt: skip


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def of_logits(logits, labels):
    if isinstance(logits, DTensor):
        assert logits.placements == (Shard(2),)
    return cross_entropy(logits, torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100), softcap=5.0)


def one_mesh(rank, ranks):
    """Loss and every parameter's gradient, by each way to the loss."""
    mesh = init_device_mesh(device(), (ranks,), mesh_dim_names=("tp",))
    ids, labels = batch()
    alone = Model()
    expected = alone(ids, labels, softcap=5.0)
    expected.backward()
    for name, (style, loss) in LOSSES.items():
        model = planned(mesh, style(**COLUMNS))
        made = loss(model, ids, labels)
        assert type(made) is torch.Tensor, name
        close(made, expected, name)
        made.backward()
        assert model.lm_head.weight.grad.placements == model.lm_head.bias.grad.placements == (Shard(0),)
        for (key, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            close(p.grad.full_tensor(), q.grad, f"{name}: {key}")
    hidden = leaf(alone(ids).detach())
    local_logits = planned(mesh, HeadParallel()).lm_head(hidden)
    close(local_logits, alone.lm_head(hidden).chunk(ranks, -1)[rank])


def refusals(rank, ranks):
    mesh = init_device_mesh(device(), (ranks,), mesh_dim_names=("tp",))
    ids, labels = batch()
    with pytest.raises(TypeError, match=r"HeadParallel is for an LMHead; got Linear.*LMHead\.from_linear"):
        planned(mesh, HeadParallel(), Model(nn.Linear))
    model = planned(mesh, ColwiseParallel(**COLUMNS))
    with pytest.raises(RuntimeError, match=r"ColwiseParallel would treat the loss as logits; plan .*HeadParallel"):
        model.lm_head(model(ids), labels=labels)
    with pytest.raises(ValueError, match=r"hidden has 7 tokens in dimension 1, sharded over 2 ranks; pad it"):
        planned(mesh, HeadParallel())(ids[:, :7], labels[:, :7])
    with pytest.raises(ValueError, match=r"hidden is a DTensor with placement .* must be Replicate"):
        planned(mesh, HeadParallel(input_layouts=Shard(2))).lm_head(torch.ones(3, 8, HIDDEN // 2), labels)


def fsdp2(rank, ranks):
    """Two steps on a mesh of two dimensions, which of two ranks has one replica."""
    replicas = ranks // 2
    mesh = init_device_mesh(device(), (replicas, 2), mesh_dim_names=("dp", "tp"))
    mine, alone, model = mesh.get_local_rank("dp"), Model(), planned(mesh["tp"], HeadParallel(**COLUMNS))
    fully_shard(model.lm_head, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    for step in range(2):
        batches = [batch(2 * step + i) for i in range(replicas)]
        (sum(alone(*of_rank, z_loss=1e-3) for of_rank in batches) / replicas).backward()
        model(*batches[mine], z_loss=1e-3).backward()
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
        for (key, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            close(p.full_tensor(), q, f"{step}: {key}")


def test_two_ranks(tmp_path):
    spawn(tmp_path, 2, {"one_mesh": one_mesh, "refusals": refusals})


@pytest.mark.slow
def test_fsdp2(tmp_path):
    spawn(tmp_path, 4, {"fsdp2": fsdp2})


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.parametrize("check", [one_mesh, fsdp2], ids=lambda check: check.__name__)
def test_gpus(check, tmp_path):
    """Over NCCL: two, and with FSDP2 four if there are."""
    if count() < 2:
        pytest.skip("NCCL gives no two ranks one GPU")
    ranks = 4 if check is fsdp2 and count() >= 4 else 2
    spawned(ranks, tmp_path / "meeting", [partial(check_of_ranks, check)])


def check_of_ranks(check):
    check(dist.get_rank(), dist.get_world_size())
