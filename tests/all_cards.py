"""Runs ranks on all GPUs of this machine, whatever card a worker of pytest has; if there are too few, ranks share them.

Ranks that share a GPU take turns on it, so a rank that waits for another waits for that one's turn: sizes are small.
"""

import contextlib
import faulthandler
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TIME = 100  # seconds, for a check


def count():
    """How many cards there are."""
    every = os.environ.get("EVERY_CARD")
    return len(every.split(",")) if every else torch.cuda.device_count()


@contextlib.contextmanager
def all_cards(ranks=None):
    """What is started here sees as many cards as it has ranks, if there are so many, else all; no others' are those."""
    every = os.environ.get("EVERY_CARD", "").split(",")
    size = min(ranks or len(every), len(every))
    groups = [every[i : i + size] for i in range(0, len(every) - size + 1, size)]
    with contextlib.ExitStack() as taken:
        while not (mine := next((group for group in groups if _take(group, taken)), None)):
            time.sleep(0.2)
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        if "EVERY_CARD" in os.environ:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        try:
            yield
        finally:
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before


def _take(cards, taken):
    """Whether these cards were free; then they are locked until the stack is left."""
    with contextlib.ExitStack() as mine:
        for card in cards:
            lock = mine.enter_context(open(Path(tempfile.gettempdir()) / f"onchip-card{card}-{os.getuid()}", "w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        taken.push(mine.pop_all())
    return True


def named(check):
    return getattr(check, "__name__", str(check))


def _run(rank, ranks, meeting, checks):
    cards = torch.cuda.device_count()
    shared = cards < ranks
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1" if shared else "0"
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.cuda.set_device(rank % cards)
    timeout = timedelta(seconds=TIME * len(checks))
    faulthandler.dump_traceback_later(timeout.total_seconds() - 5, exit=True)
    dist.init_process_group("gloo" if shared else "nccl", f"file://{meeting}", timeout, world_size=ranks, rank=rank)
    for check in checks:
        start = time.monotonic()
        try:
            check()
            torch.cuda.synchronize()
        except BaseException as error:
            error.add_note(f"in {named(check)} on rank {rank} of {ranks}")
            raise
        if rank == 0:
            print(f"{named(check)}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    dist.barrier()
    os._exit(0)  # where interpreter and process group end in an orderly way, gloo's threads abort now and then


def spawned(ranks, meeting, checks):
    """Run checks in as many processes; one that waits for ever is ended."""
    with all_cards(ranks):
        processes = torch.multiprocessing.spawn(_run, (ranks, str(meeting), checks), nprocs=ranks, join=False)
        deadline = time.monotonic() + TIME * len(checks)
        try:
            while not processes.join(timeout=1, grace_period=1):
                assert time.monotonic() < deadline, f"{ranks} processes took more than {TIME} s for each check"
        finally:
            for process in processes.processes:
                process.kill()
                process.join(10)


def environment(**more):
    """Of processes that import what this one does; NVLink's multicast stays off."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "NCCL_NVLS_ENABLE": "0"} | more


def torchrun(ranks, *command, seconds=TIME, **more):
    """What `torchrun` made of a script or module in as many processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *command]
    with all_cards(ranks):
        return subprocess.run(
            launch, env=environment(**more), capture_output=True, text=True, timeout=seconds, check=False
        )
