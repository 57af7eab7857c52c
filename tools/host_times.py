"""Times how long the host takes to launch calls on a GPU: python tools/host_times.py [RESULTS.json]

Each call's forward and backward are timed apart, for calls like earlier ones ("repeated") and for calls with a number
of tokens that wasn't seen before ("new").  "In a row": calls follow each other behind a kernel that sleeps, as in
training, where the host is ahead.  "After a wait": each call begins when the device is done, with the host's caches and
clock cold.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onchip.torch import (
    attention,
    cross_entropy,
    fp8_linear,
    grouped_matmul,
    linear_cross_entropy,
    linear_jsd,
    linear_log_probs,
)

SLEEP = 200_000_000  # cycles: longer than the calls of one measurement take the host
Times = tuple[float, float]  # of forward and backward, in milliseconds
Step = Callable[[int], Times]  # given a number of tokens


def normal(*shape: int, grad: bool = True) -> Tensor:
    x: Tensor = torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5
    return x.requires_grad_(grad)


def step_of(call: Callable[..., Tensor], tokens: Sequence[Tensor], others: Sequence[Tensor] = ()) -> Step:
    """A step of `call` on the first rows of `tokens`, the first of which gets a gradient, and on all of `others`."""

    def step(number: int) -> Times:
        x, *more = (x[:number] for x in tokens)
        x = x.detach().requires_grad_()
        for other in others:
            other.grad = None
        begin = time.perf_counter()
        made = call(x, *more, *others)
        middle = time.perf_counter()
        upstream = None if made.ndim == 0 else torch.ones_like(made)
        again = time.perf_counter()
        made.backward(upstream)  # type: ignore[no-untyped-call]
        return 1e3 * (middle - begin), 1e3 * (time.perf_counter() - again)

    return step


def steps() -> Iterator[tuple[str, Step, list[int], list[tuple[int, int]], int]]:
    """Calls' names and steps, numbers of tokens to repeat, ranges of new ones, and how many the launch queue takes."""
    (hidden, vocab), most = (4096, 128256), 65536
    h, weight = normal(most, hidden, grad=False), normal(vocab, hidden)
    ids = torch.randint(vocab, (most,), device="cuda")
    ranges = [(512, 1024), (4096, 8192)]

    def loss(op: Callable[..., Tensor]) -> Step:
        return step_of(lambda x, i, w: op(x, w, i), (h, ids), (weight,))

    yield "plain expression", loss(lambda x, w, i: functional.cross_entropy(x @ w.T, i)), [512], [(512, 1024)], 15
    yield "linear_cross_entropy", loss(linear_cross_entropy), [512, 4096, 32768], [*ranges, (32768, most)], 5
    yield "linear_log_probs", loss(linear_log_probs), [512, 4096], ranges, 10
    both = h, h.flip(0)
    jsd = step_of(lambda x, y, w: linear_jsd(x, w, y, w.detach()), both, (weight,))
    yield "linear_jsd", jsd, [512, 4096], ranges, 4
    logits = normal(8192, 32000, grad=False)
    yield "cross_entropy, V 32000", step_of(cross_entropy, (logits, ids % 32000)), [512, 4096], ranges, 30
    square = normal(hidden, hidden)
    yield "fp8_linear, 4096 x 4096", step_of(lambda x, w: fp8_linear(x, w), (h,), (square,)), [512], ranges[:1], 20
    experts, sizes = normal(8, 2048, hidden), torch.full((8,), 64, device="cuda")
    grouped = step_of(lambda x, w: grouped_matmul(x, w, sizes), (h,), (experts,))
    yield "grouped_matmul, 8 groups, 4096 x 2048", grouped, [512], ranges[:1], 30
    heads = h.view(most, 32, 128), both[1].view(most, 4, 8, 128)
    of_heads = step_of(lambda q, kv: attention(q[None], kv[None, :, 0], kv[None, :, 1]), heads)
    yield "attention, 32 heads of 128", of_heads, [512, 4096], ranges, 30


def timed(step: Step, lengths: Sequence[int], *, in_a_row: bool) -> list[Times]:
    found = []
    torch.cuda.synchronize()
    if in_a_row:
        torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]
    for length in lengths:
        found.append(step(length))
        if not in_a_row:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return found


def row(call: str, step: Step, lengths: Sequence[int], most: int) -> dict[str, Any]:
    """Medians of a call's times, for the first half of these lengths in a row, and for the others after a wait."""
    half, found = len(lengths) // 2, {"call": call}
    row_of = [lengths[i : i + most] for i in range(0, half, most)]
    in_a_row = [x for part in row_of for x in timed(step, part, in_a_row=True)]
    for way, times in (("in_a_row", in_a_row), ("after_wait", timed(step, lengths[half:], in_a_row=False))):
        for of, ms in zip(("forward", "backward"), zip(*times, strict=True), strict=True):
            found[f"{of}_{way}_ms"] = round(statistics.median(ms), 3)
    return found


def rows() -> Iterator[dict[str, Any]]:
    drawn = random.Random(0)
    for name, step, repeated, ranges, most in steps():
        for tokens in repeated:
            timed(step, [tokens] * 6, in_a_row=False)  # what is repeated is prepared first
            yield row(f"{name}, T {tokens}", step, [tokens] * 60, most)
        for first, last in ranges:
            lengths = drawn.sample(range(first, last), 100)
            timed(step, lengths[:40], in_a_row=False)  # kernels are compiled, and most plans made
            yield row(f"{name}, a new length between {first} and {last}", step, lengths[40:], most)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    found = []
    for made in rows():
        found.append(made)
        print(json.dumps(made), flush=True)
    if len(sys.argv) > 1:
        versions = {x: version(x) for x in ("torch", "triton")}
        environment = {"gpu": torch.cuda.get_device_name(), **versions, "date": str(date.today())}
        title = "What calls take the host, medians of 30; a head of H 4096 and V 128256, bf16; by tools/host_times.py"
        document = {"title": title, "environment": environment, "rows": found}
        Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
