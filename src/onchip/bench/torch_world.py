"""The ranks of `onchip bench --world`: one process per GPU with NCCL, or with gloo on the CPU.

Each rank runs the harness; the first prints what it finds and hands it to the process that started them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, start_processes

from onchip.bench import harness, report
from onchip.bench.timing import Alone
from onchip.registry import OPS

T = TypeVar("T")
TCPStore: Any = vars(dist)["TCPStore"]  # untyped
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# Of a collective whose other ranks have left it; what ranks tell each other waits for that, and longer.
TIMEOUT, LONGER = timedelta(minutes=5), timedelta(minutes=15)


class RankFailed(Exception):
    """A rank has ended with an error, and so the others were ended."""


@dataclass(frozen=True)
class Ranks(Alone):
    """The processes of a benchmark, seen by one of them."""

    words: dist.ProcessGroup
    """A separate group for messages between ranks, which a step's collectives can't disturb."""
    token: Tensor
    """A tensor on the device; once all ranks have summed it, all are there."""

    def every(self, value: T) -> list[T]:
        said: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(said, value, group=self.words)
        except RuntimeError as error:
            # A rank is lost: its error is the one to show, and this process will be ended.
            sleep(60)
            raise SystemExit(f"a rank is lost: {error}") from None
        return said

    def together(self, work: Callable[[], T]) -> T:
        failure: Exception | None = None
        try:
            made = work()
        except Exception as error:
            failure = error
        said = self.every(failure and harness.one_line(failure))
        try:
            if failure is not None:
                raise failure
        finally:
            failure = None  # its frames would keep themselves, and a step's tensors, alive
        for rank, words in enumerate(said):
            if words is not None:
                raise RuntimeError(f"rank {rank}: {words}")
        return made

    def time(self, time_once: Callable[..., float], step: Any, device: str) -> float:
        return max(self.every(self.together(lambda: time_once(step, device, self.in_step))))

    def in_step(self) -> None:
        """Wait for the other ranks: on the CPU this process does, on CUDA the device."""
        dist.all_reduce(self.token)


@contextmanager
def joined(rank: int, ranks: int, device: str, port: int) -> Iterator[Ranks]:
    """The process group of the ranks, with each on its device; `port` is that of their store."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = TCPStore("localhost", port)
    dist.init_process_group(BACKENDS[device], store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        words = dist.new_group(backend="gloo", timeout=LONGER)
        yield Ranks(words, torch.zeros(1, device=device))
    finally:
        dist.destroy_process_group()


def launch(ranks: int, device: str, work: Callable[..., None], *arguments: Any) -> None:
    """Run work(its `Ranks`, *arguments), a function at a module's top level, in so many processes.

    Raises:
        RankFailed: a rank has raised or died; the others were ended.
        KeyboardInterrupt: Ctrl-C, or SIGTERM; all were ended.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    started = start_processes(_as_rank, (ranks, device, store.port, work, arguments), ranks, join=False)
    try:
        while not started.join():
            pass
    except ProcessException as error:
        words = str(error).strip().splitlines()[-1]  # what it raised, or what ended it
        raise RankFailed(f"rank {error.error_index} failed: {words}") from None
    finally:
        for process in started.processes:
            process.kill()


def _as_rank(
    rank: int, ranks: int, device: str, port: int, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    if device == "cpu":
        torch.set_num_threads(torch.get_num_threads() // ranks or 1)
    with joined(rank, ranks, device, port) as world:
        work(world, *arguments)


def run_cases(op: str, ranks: int, *, implementations: list[str], console: Console, **options: Any) -> harness.Outcome:
    """As `harness.run_cases`, for the op's `WORLD` in so many processes; if they end early, what they had found by then
    is included.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        given = {"implementations": implementations, **options}
        failure = None
        try:
            launch(ranks, options["device"], _run_rank, op, given, console.stderr, str(path))
        except (KeyboardInterrupt, RankFailed) as error:
            failure = error
        found = msgspec.json.decode(path.read_bytes()) if path.exists() else {"done": 0}
    outcome = msgspec.convert({name: x for name, x in found.items() if name != "done"}, harness.Outcome)
    if failure is not None:
        outcome.failure = str(failure) or None
        outcome.stop(options["cases"][found["done"] :])
    return outcome


def _run_rank(world: Ranks, op: str, options: Mapping[str, Any], stderr: bool, path: str) -> None:
    """Run the harness in this rank; the first rank writes what is found to `path`, case by case."""
    target: harness.BenchedOp = OPS[op].entry("bench:WORLD")
    by_name = {impl.name: impl for impl in target.IMPLEMENTATIONS}
    first, done = dist.get_rank() == 0, 0
    console = Console(stderr=stderr, quiet=not first)

    def show(rows: Any, outcome: harness.Outcome) -> None:
        nonlocal done
        done += 1
        if first:
            report.print_rows([vars(row) for row in rows], console)
            whole = Path(f"{path}.part")
            whole.write_text(json.dumps({"done": done, **outcome.as_json()}))
            whole.replace(path)

    implementations = [by_name[name] for name in options["implementations"]]
    given = {**options, "implementations": implementations}
    harness.run_cases(op, target, **given, console=console, show=show, world=world)
