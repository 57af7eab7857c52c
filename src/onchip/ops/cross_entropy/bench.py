"""The benchmark of cross_entropy: its inputs, its peers, and steps that write the gradient over the logits.

Its cases take the mean over the tokens that are not ignored, with no options, so that every peer can run them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from onchip.bench.benchmark import Benchmark, BenchProblem, cross_entropies
from onchip.bench.peers import NARROW, Implementation, gpu_only, imported, needs, optional, own, plain_peers
from onchip.ops.cross_entropy import checks
from onchip.oracle.cases import draw_target, ignore_some
from onchip.oracle.checks import op_in

Loss = Callable[[Any, Any], Any]
"""Mean cross-entropy of (logits [T, V], target [T]) over the tokens whose target is not IGNORED."""


def _make(fw: Any, case: checks.CrossEntropyCase, device: str, dtype: str) -> BenchProblem:
    assert not case.options
    rng = np.random.default_rng(0)
    logits = fw.drawer(device)(case.tokens, case.vocab + case.sliced, case.logit_std, case.logit_offset, dtype)
    target = draw_target(case, rng)
    ignore_some(case, target, rng)
    return BenchProblem(case, device, (fw.leaf(logits, dtype, case.vocab), fw.ids(target, device)), columns=case.vocab)


# ------------------------------------------------------------------------------------------------------------ peers


def _plain(fw: Any, wide: bool, **losses: Any) -> Loss:
    return lambda logits, target: fw.cross_entropy(fw.constant(logits, "float32") if wide else logits, target, **losses)


def _liger(inplace: bool) -> Loss:
    from liger_kernel.transformers import LigerCrossEntropyLoss

    loss: Loss = LigerCrossEntropyLoss()
    return loss


def _implementations(fw: Any) -> Sequence[Implementation]:
    op, backends = op_in(fw, "cross_entropy"), op_in(fw, "cross_entropy", "BACKENDS")

    def load(backend: str, inplace: bool = False) -> Loss:
        options = {"inplace_backward": inplace} if fw.NAME == "torch" else {}
        return lambda logits, target: op(logits, target, backend=backend, **options)

    common = (*own(load, backends), *plain_peers(fw.NAME, partial(_plain, fw)))
    if fw.NAME == "jax":
        optax = partial(_plain, fw, wide=True, losses=fw.by_optax)
        return (*common, Implementation("optax, float32 logits", optax, needs("optax"), package="optax"))
    load_quack = partial(imported, "quack.cross_entropy:cross_entropy", reduction="mean")
    liger, quack = (gpu_only(package, ("float32", *NARROW)) for package in ("liger-kernel", "quack-kernels"))
    return (
        *common,
        *(replace(impl, steps=_in_place_steps) for impl in own(load, backends, ", in place", inplace=True)),
        # It writes the gradient over the logits in forward.
        optional("liger", "liger-kernel", _liger, liger, _in_place_steps, inplace=True),
        optional("quack", "quack-kernels", load_quack, quack, inplace_backward=False),
        optional("quack, in place", "quack-kernels", load_quack, quack, _in_place_steps, inplace_backward=True),
    )


def _in_place_steps(problem: BenchProblem, loss: Loss) -> dict[str, Any]:
    """'forward+backward' overwrites the logits."""
    from onchip.bench.torch_steps import over_its_input

    forward = TORCH.plain_steps(problem, loss)["forward"]
    return {"forward": forward, "forward+backward": over_its_input(loss, *problem.arrays)}


TORCH, JAX = (
    Benchmark(framework, checks.SUITES, _implementations, _make, cross_entropies, leaves=("logits",))
    for framework in ("torch", "jax")
)
