"""Losses whose vocabulary is sharded over processes, compared with the same losses in one process."""

import os
import time
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.testing import assert_close

from all_cards import all_cards, count
from interpreter import speed_up
from processes import start


def spawn(tmp_path, ranks, checks, timeout=60):
    """Run the checks, functions by name, one after the other in so many processes; raise with what failed first.

    With TRITON_INTERPRET=1 in the environment they run under Triton's interpreter.
    """
    _spawn(tmp_path, ranks, checks, timeout, "gloo")


def spawn_on_gpus(tmp_path, checks, timeout=60):
    """The same in a process for each GPU of the machine, over NCCL, also where a worker has one of them."""
    with all_cards():
        _spawn(tmp_path, count(), checks, timeout, "cpu:gloo,cuda:nccl")


def _spawn(tmp_path, ranks, checks, timeout, backend):
    start(_checked, ranks, str(tmp_path), ranks, checks, timeout, backend)
    said = [(tmp_path / f"rank{rank}").read_text() for rank in range(ranks)]
    assert not any(said), "\n".join(said)


def _checked(rank, folder, ranks, checks, timeout, backend):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET"):
        speed_up()
    if "nccl" in backend:
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        torch.cuda.set_device(rank)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(backend, meeting, timedelta(seconds=timeout), world_size=ranks, rank=rank)
    failed = ""
    for name, check in checks.items():
        torch.manual_seed(0)
        start = time.perf_counter()
        try:
            check(rank, ranks)
            dist.barrier()
        except Exception:  # the others wait for this rank, and will find it gone
            failed = f"rank {rank}, {name}: {traceback.format_exc()}"
            break
        if rank == 0:
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    with open(f"{folder}/rank{rank}", "w") as file:
        file.write(failed)
    os._exit(0)  # where interpreter and process group end in an orderly way, gloo's threads abort now and then


def cut(sizes, rank):
    """This rank's part of the vocabulary."""
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def leaf(x):
    return None if x is None else x.detach().clone().requires_grad_()


def same_bits(*tensors):
    """Raise unless all ranks have the same."""
    for x in tensors:
        x = x.detach().contiguous()
        all_ranks = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(all_ranks, x)
        for other in all_ranks:
            assert_close(other, x, rtol=0, atol=0, equal_nan=True)


def close(got, expected, what="", whole=None):
    """The relative norm of the difference is that of sums in another order.

    Relative to what is expected, or to the `whole` that it is a part of: one entry may be a difference of large sums.
    """
    assert (got is None) == (expected is None), what
    if got is None or not expected.is_floating_point():
        assert got is None or torch.equal(got, expected), what
        return
    bound = 2e-13 if got.dtype == torch.float64 else 1e-5 if got.is_cuda else 2e-6
    error = (got - expected).norm() / (expected if whole is None else whole).norm().clamp(min=1e-30)
    assert got.dtype == expected.dtype, (what, got.dtype, expected.dtype)
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    assert expected.numel() == 0 or error <= bound, f"{what}: relative error {float(error)} above {bound}"
