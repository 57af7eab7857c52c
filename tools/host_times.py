"""Times how long the host takes to launch a repeated call on a GPU: python tools/host_times.py [RESULTS.json]

Losses run forward and backward, layers only forward; PyTorch's own functions are timed too.  "In a row": calls follow
each other behind a kernel that sleeps, as in training.  "After a wait": each call begins when the device is done, with
the host's caches and clock cold.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from onchip.torch import Fp8Linear, fp8_linear, grouped_matmul, linear_cross_entropy, linear_log_probs

SLEEP = 200_000_000  # cycles: longer than the calls of one measurement take the host


def normal(*shape: int, grad: bool = True) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5).requires_grad_(grad)


def loss_call(op: Callable[..., torch.Tensor], tokens: int, hidden: int, vocab: int) -> Callable[[], Any]:
    h, w = normal(tokens, hidden), normal(vocab, hidden)
    ids = torch.randint(vocab, (tokens,), device="cuda")

    def call() -> Any:
        return torch.autograd.grad(op(h, w, ids).sum(), (h, w))

    return call


def plain(h: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(h, w), ids)


def calls() -> Iterator[tuple[str, Callable[[], Any], int]]:
    """Each call's name, the call, and how many of them the launch queue takes."""
    llama, qwen = (4096, 128256), (1024, 151936)
    yield "plain loss, T=512, forward and backward", loss_call(plain, 512, *llama), 15
    for tokens, (hidden, vocab) in ((512, llama), (4096, llama), (8192, qwen), (32768, llama)):
        name = f"linear_cross_entropy, T={tokens} H={hidden} V={vocab}, forward and backward"
        yield name, loss_call(linear_cross_entropy, tokens, hidden, vocab), 5 if tokens > 4096 else 15
    yield "linear_log_probs, T=4096 H=4096, forward and backward", loss_call(linear_log_probs, 4096, *llama), 15
    x, w, b = normal(256, 1024), normal(1024, 1024), normal(1024)
    layer = Fp8Linear(1024, 1024, device="cuda", dtype=torch.bfloat16)
    yield "F.linear, forward", lambda: functional.linear(x, w, b), 30
    yield "fp8_linear, forward", lambda: fp8_linear(x, w), 30
    yield "Fp8Linear with bias, forward", lambda: layer(x), 30
    experts, sizes = normal(8, 1024, 1024), torch.full((8,), 32, device="cuda")
    yield "grouped_matmul, 8 groups, forward", lambda: grouped_matmul(x, experts, sizes), 30


def times(call: Callable[[], Any], number: int, *, in_a_row: bool) -> list[float]:
    """The milliseconds of each call."""
    found = []
    torch.cuda.synchronize()
    if in_a_row:
        torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]
    for _ in range(number):
        begin = time.perf_counter()
        made = call()
        found.append(1e3 * (time.perf_counter() - begin))
        del made
        if not in_a_row:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return found


def rows() -> Iterator[dict[str, Any]]:
    for name, call, number in calls():
        for _ in range(12):  # what is repeated is recorded first; CUDA graphs come later
            call()
        for way in ("in a row", "after a wait"):
            ms = sorted(x for _ in range(3) for x in times(call, number, in_a_row=way == "in a row"))
            tenth = ms[len(ms) // 10]
            yield {"call": name, "way": way, "median_ms": statistics.median(ms), "p10_ms": tenth, "calls": len(ms)}
        torch.cuda.empty_cache()


if __name__ == "__main__":
    found = []
    for row in rows():
        found.append(row)
        print(json.dumps(row), flush=True)
    if len(sys.argv) > 1:
        environment = {"gpu": torch.cuda.get_device_name(), **{x: version(x) for x in ("torch", "triton")}}
        document = {"title": "What repeated calls take the host", "environment": environment, "rows": found}
        Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
