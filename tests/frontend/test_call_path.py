"""The path of a call in PyTorch, as docs/architecture.md describes it; test_mosaic_backend.py has that of JAX.

Run as a script, it prints which of our functions are on the stack when a kernel is launched.  Triton's interpreter
is chosen when Triton is imported, so this takes a process of its own.
"""

import os
import subprocess
import sys


def test_few_functions_from_the_public_one_to_a_kernel():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, __file__]
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.splitlines()
    # Before the public function is `repeatable`.
    lines = [[grads, *names] for grads, repeatable, *names in map(str.split, said) if repeatable == "call"]
    assert len(lines) == len(said)
    # With gradients and without.
    assert {(grads, public) for grads, public, *_ in lines} == {(x, op) for x in ("False", "True") for op in MOST}
    for _, public, forward, *engine in lines:
        assert forward == "_forward"
        assert len(engine) <= MOST[public]


# Functions of the engine.
MOST = {"linear_cross_entropy": 2, "grouped_matmul": 1}


def main():
    import torch
    from triton.runtime.interpreter import GridExecutor

    from onchip.torch import grouped_matmul, linear_cross_entropy
    from stack import our_functions

    for grads in (False, True):
        GridExecutor.__call__ = lambda *_, grads=grads, **__: print(grads, *our_functions())
        hidden, weight = (torch.randn(n, 16, dtype=torch.float16, requires_grad=grads) for n in (4, 64))
        linear_cross_entropy(hidden, weight, torch.arange(4), backend="triton")
        grouped_matmul(hidden, weight.view(2, 32, 16), torch.tensor([1, 3]), backend="triton")


if __name__ == "__main__":
    main()
