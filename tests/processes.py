"""Processes that have imported PyTorch when they start: copies of one that did, for each process that runs tests."""

import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import runpy
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch

# It takes seconds.  Triton must not be among it: it reads TRITON_INTERPRET when it is imported.
IMPORTED = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "onchip.torch", "pytest"]


def start(run, ranks, *arguments):
    """Call run(rank, *arguments) in so many processes; raise what the first that failed raised."""
    # CUDA can't be used in a copy of a process that has counted devices, as an import might.
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    if method == "forkserver":
        _ready()
    torch.multiprocessing.start_processes(_rank, _given(run, arguments), nprocs=ranks, start_method=method)


def run_script(script, arguments, environment, seconds):
    """Its exit status, and what it printed to both streams; its folder is the first that it imports from."""
    _ready()
    with TemporaryDirectory() as folder:
        streams = Path(folder, "out"), Path(folder, "err")
        given = _given(_script, (str(script), arguments, *map(str, streams)), environment)
        process = multiprocessing.get_context("forkserver").Process(target=_called, args=given)
        process.start()
        process.join(seconds)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        said, errors = (x.read_text() if x.exists() else "" for x in streams)
        return process.exitcode, said, errors + f"\nkilled after {seconds} s" * late


def _ready():
    multiprocessing.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # a copy has no threads but its own
        multiprocessing.forkserver.ensure_running()


def _given(run, arguments, environment=os.environ):
    return dict(environment), pickle.dumps((run, arguments))


def _rank(rank, environment, called):
    _called(environment, called, rank)


def _called(environment, called, *first):
    """With the environment of now, not of when the process began that is copied; what reads it is imported after."""
    os.environ.clear()
    os.environ.update(environment)
    run, arguments = pickle.loads(called)
    run(*first, *arguments)


def _script(script, arguments, *streams):
    for descriptor, name in enumerate(streams, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
