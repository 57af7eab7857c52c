"""Patched models of transformers in two processes (torchrun --nproc-per-node 2): each kind of parallelism must find the
gradients that one process finds on the whole batch without the patch.
"""

import os
import sys
import tempfile
import warnings
from functools import partial

import torch
import torch.distributed as dist
from tiny import llama, trained
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from onchip.integrations.transformers import patch


def batch(rows):
    ids = torch.randint(3, 97, (4, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(torch.arange(12) < torch.tensor([[2], [5], [1], [7]]), -100)
    return {"input_ids": ids[rows], "labels": labels[rows]}


def expected():
    """The gradients of a step on the whole batch, and of a second one."""
    model = llama()
    model(**batch(slice(None)), num_items_in_batch=20).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def ddp(model, **options):
    return DistributedDataParallel(model, **options)


def root(model):
    fully_shard(model)
    return model


def head_alone(model, keep=False):
    fully_shard(model.lm_head, reshard_after_forward=not keep)
    fully_shard(model)
    return model


def grouped(model):
    fully_shard([model.model.norm, model.lm_head])
    fully_shard(model)
    return model


def kept_group(model):
    """As accelerate does it."""
    fully_shard(model.model.layers[0])
    fully_shard(model.model.embed_tokens)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
    fully_shard(model)
    return model


def fsdp1(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp1_head(model):
    model.lm_head = fsdp1(model.lm_head)
    return fsdp1(model)


WAYS = {
    "DDP": ddp,
    "DDP, static graph": partial(ddp, static_graph=True),
    "DDP, unused parameters": partial(ddp, find_unused_parameters=True),
    "FSDP2": root,
    "FSDP2, head alone": head_alone,
    "FSDP2, head alone and kept": partial(head_alone, keep=True),
    "FSDP2, grouped": grouped,
    "FSDP2, grouped and kept": kept_group,
    "FSDP1": fsdp1,
    "FSDP1, head alone": fsdp1_head,
}


def step(name, make, rank, own_loss):
    model = llama()
    report = patch(model)
    wrapped = make(model)
    given = batch(slice(2 * rank, 2 * rank + 2))
    for _ in range(3):  # the later ones find what the first left
        wrapped.zero_grad()
        if own_loss:
            labels = given["labels"]
            z = wrapped(input_ids=given["input_ids"]).logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(z, labels[:, 1:].flatten(), reduction="sum") / 20
        else:
            loss = wrapped(**given, num_items_in_batch=20).loss
        (2 * loss).backward()
    found = {}
    for n, p in wrapped.named_parameters():
        g = p.grad
        if hasattr(g, "full_tensor"):
            g = g.full_tensor()
        found[n.removeprefix("module.")] = g
    if name.startswith("FSDP1"):
        with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
            found = {n.replace("_fsdp_wrapped_module.", ""): p.grad.clone() for n, p in wrapped.named_parameters()}
    for n, g in expected().items():
        torch.testing.assert_close(found[n], g, rtol=1e-4, atol=1e-6, msg=lambda m, n=n: f"{name}: {n}: {m}")
    fused = 0 if own_loss or name == "FSDP2, grouped" else 3
    assert (report.losses, report.materialized) == (fused, {}), (name, report)
    with torch.no_grad():
        logits, plain = wrapped(**given).logits, llama()(input_ids=given["input_ids"]).logits
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: logits: {m}")


def train(patched):
    model = llama()
    report = patch(model) if patched else None
    with tempfile.TemporaryDirectory() as folder:
        _, losses = trained(model, folder, steps=2, gradient_accumulation_steps=2, use_cpu=True)
    assert report is None or (report.losses > 0 and not report.materialized), report
    return torch.tensor(losses)


def main():
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    failed = []
    checks = {f"{n}{' and a loss of its own' if own else ''}": partial(step, n, make, rank, own)
              for n, make in WAYS.items() for own in (False, True)}  # fmt: skip
    checks["Trainer"] = lambda: torch.testing.assert_close(train(True), train(False))
    for name, check in checks.items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        print(rank, name, file=sys.stderr, flush=True) if os.environ.get("TELL") else None
        try:
            check()
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}"[:600])
    if rank == 0:
        print("\n".join(failed) or f"{len(checks)} checks passed")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(bool(failed))


if __name__ == "__main__":
    main()
