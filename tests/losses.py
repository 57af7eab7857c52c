"""The losses over a vocabulary in PyTorch, all called alike, and the oracle's results for the same numbers."""

import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from onchip.frontend import torch_prepared
from onchip.ops.cross_entropy import checks as ce_checks
from onchip.ops.linear_cross_entropy import checks as lce_checks
from onchip.ops.linear_log_probs import checks as llp_checks
from onchip.oracle.torch import as_array, computed
from onchip.torch import cross_entropy, linear_cross_entropy, linear_log_probs, log_probs
from onchip.vocab.rows import launches as row_launches
from onchip.vocab.rows.memory import RowTiles
from onchip.vocab.triton import memory as triton_memory
from onchip.vocab.triton import planner as triton_planner
from onchip.vocab.triton import setup as triton_setup
from shared import assert_within_bounds

TOKENS, HIDDEN, VOCAB = 24, 16, 70
CHOICES = ("argmax", "correct", "top1")
EVERY_STATISTIC = dict.fromkeys(("lse", "top1", "mean_logits", "log_sum_sq_probs"), True)


@dataclass(frozen=True, eq=False)
class Loss:
    """An op, the options of each of its calls, and where it runs."""

    op: Callable
    checks: ModuleType
    options: Mapping = field(default_factory=dict)
    backend: str = "plain"
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def __str__(self):
        return "-".join([self.op.__name__, *(v if isinstance(v, str) else k for k, v in self.options.items() if v)])

    @property
    def linear(self):
        return self.op not in (cross_entropy, log_probs)

    @property
    def of_ids(self):
        return self.op in (linear_log_probs, log_probs)

    @property
    def ids(self):
        """What the op calls the vocabulary's indices."""
        return "ids" if self.of_ids else "target"

    @property
    def inplace(self):
        return self.options.get("inplace", False)

    @property
    def values(self):
        """What has an upstream gradient."""
        if not self.of_ids:
            return ("loss",)
        return ("log_prob", "entropy", "lse") if self.options["entropy"] else ("log_prob", "lse")

    def problem(self, shape=(2, TOKENS // 2), hidden=HIDDEN, vocab=VOCAB, ids=None, seed=0, dtype=None):
        """Arguments by name, floats among them as leaves; `ids`: so many of each token, in a dimension of their own."""
        g = torch.Generator().manual_seed(seed)

        def leaf(*shape):
            x = torch.randn(*shape, generator=g).to(device=self.device, dtype=dtype or self.dtype)
            return x.requires_grad_()

        if self.linear:
            given = {"hidden": leaf(*shape, hidden), "weight": leaf(vocab, hidden), "bias": leaf(vocab)}
        else:
            given = {"logits": leaf(*shape, vocab)}
        shape = shape if ids is None else (*shape, ids)
        return given | {self.ids: torch.randint(vocab, shape, generator=g).to(self.device)}

    def call(self, given, **more):
        """What the op returns, by name; `given` may hold further keyword arguments."""
        options = {name: x for name, x in (self.options | more).items() if name != "inplace"}
        if self.inplace:
            given = given | {"logits": computed(given["logits"])}
            options["inplace_backward"] = True
        if self.of_ids:
            out = self.op(**given, **EVERY_STATISTIC | options, backend=self.backend)
            return {name: x for name, x in out._asdict().items() if x is not None}
        loss, stats = self.op(**given, **options, return_stats=True, backend=self.backend)
        return {"loss": loss, **stats._asdict()}

    def run(self, given, upstream=None, **more):
        """What the op returns, and the gradients of all leaves as `grad_<name>`."""
        made = self.call(given, **more)
        upstream = self.upstream(made) if upstream is None else upstream
        leaves = [name for name, x in given.items() if isinstance(x, Tensor) and x.requires_grad]
        if leaves:
            wanted = [given[name] for name in leaves]
            grads = torch.autograd.grad([made[name] for name in upstream], wanted, list(upstream.values()))
            made |= {f"grad_{name}": g for name, g in zip(leaves, grads, strict=True)}
        return {name: x.detach() for name, x in made.items()}

    def upstream(self, made):
        """No two numbers the same, and strided."""

        def of(x):
            numbers = torch.linspace(-1, 2, x.numel(), device=x.device).view(x.shape[::-1])
            return numbers.permute(tuple(reversed(range(x.ndim))))

        return {name: of(made[name]) for name in self.values}

    def own_cases(self):
        """Those of its cases that are of logits, or of hidden states, as it takes them."""
        return [case for case in self.checks.CHECKER.cases if bool(getattr(case, "hidden", 0)) == self.linear]

    def oracle(self, given, upstream, **more):
        """The same in float64, from exactly these numbers."""
        mathematical = ("shift", "reduction", "ignore_index", "normalizer", "label_smoothing", "z_loss", "softcap",
                        "logit_scale", "temperature", "token_weight", "class_weight")  # fmt: skip
        options = {name: x for name, x in (self.options | more).items() if name in mathematical}
        named = given | options | {f"grad_{name}": g for name, g in upstream.items()}
        arrays = {name: as_array(x) if isinstance(x, Tensor) else x for name, x in named.items()}
        return self.checks.CHECKER.oracle(**arrays)

    def assert_right(self, given, upstream=None, *, scale=1.0, bound=None, **more):
        """All that the op returns, and its gradients, are the oracle's up to roundings; gives both."""
        made = self.run(given, upstream, **more)
        upstream = self.upstream(made) if upstream is None else upstream
        oracle = self.oracle(given, upstream, **more)
        for name, x in made.items():
            assert_near(name, x, torch.from_numpy(np.asarray(getattr(oracle, name))), scale, bound)
        return made, oracle

    def assert_case(self, case, dtype=None, **how):
        """A case is within its bounds of the oracle."""
        how = self.options | how
        how = {name: x for name, x in how.items() if name != "reduction"}
        dtype = self.dtype if dtype is None else dtype
        assert_within_bounds(self.checks.CHECKER.check_case(case, dtype, self.device, backend=self.backend, **how))

    def case(self, name, tokens, hidden, vocab, **more):
        """A case of these sizes; `hidden` and a bias are for the linear ones."""
        sizes = (tokens, vocab) if self.op is cross_entropy else (tokens, hidden if self.linear else 0, vocab)
        made = type(self.checks.CHECK_CASES[0])
        options = more.pop("options", {})
        if self.of_ids:
            names = ("softcap", "logit_scale", "temperature", "ignore_index")
            options = {name: x for name, x in options.items() if name in names}
        if not self.linear:
            more.pop("bias", None)
        more = {name: x for name, x in more.items() if name in made.__dataclass_fields__}
        return made(name, *sizes, **more, options=options)


def assert_near(name, made, expected, scale=1.0, bound=None):
    """A float32 number is a few roundings from `expected`, times `scale` for larger terms; a 16-bit one as many of its
    own.  `bound` is that of gradients' relative errors where products are of 16 bits.  NaN and infinity must agree.
    """
    assert made.shape == expected.shape, (name, made.shape, expected.shape)
    if name in CHOICES:
        assert torch.equal(made.cpu(), expected.to(made.dtype)), name
        return
    a, b = made.cpu().double(), expected.double()
    for special in (torch.isnan, torch.isinf):
        assert torch.equal(special(a), special(b)), (name, made, expected)
    assert torch.equal(a[a.isinf()], b[b.isinf()]), name
    a, b = (x.nan_to_num(0, 0, 0) for x in (a, b))
    if name.startswith("grad_") and bound is not None:
        limit = bound * float(b.norm()) + 1e-6
    else:
        limit = 32 * torch.finfo(torch.float32).eps * scale * max(1.0, float(b.norm()))
        if made.dtype != torch.float32:
            limit = max(limit, torch.finfo(made.dtype).eps * float(b.norm()))
    assert float((a - b).norm()) <= limit, (name, float((a - b).norm()), limit, made, expected)


LCE = Loss(linear_cross_entropy, lce_checks)
CE = Loss(cross_entropy, ce_checks)
LLP = Loss(linear_log_probs, llp_checks)
LP = Loss(log_probs, llp_checks)


def losses(backend="plain", device="cpu", *, few=False):
    """Each op with the options that choose another way through the code; `few`: pairs of those."""
    half = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter computes bfloat16 wrongly

    def make(loss, **options):
        dtype = half if backend == "triton" and loss.linear else torch.float32
        return Loss(loss.op, loss.checks, options, backend, device, dtype)

    ways = list(itertools.product(("stash", "recompute"), ("mean", "none")))
    for strategy, reduction in (ways[0], ways[3]) if few else ways:
        yield make(LCE, strategy=strategy, reduction=reduction)
    ways = list(itertools.product((False, True), ("mean", "none")))
    for inplace, reduction in (ways[0], ways[3]) if few else ways:
        yield make(CE, inplace=inplace, reduction=reduction)
    yield make(LP, entropy=True)
    for entropy in (False, True):
        yield make(LLP, entropy=entropy)


# ------------------------------------------------------------------------------------------------- plans of the kernels


@contextmanager
def _planned(**way):
    """The kernels' plan is another one; no prepared call outlives it."""
    torch_prepared.forget()
    with mock.patch.object(triton_planner, "plan", **way) as planned:
        yield planned
    torch_prepared.forget()


def mixed_plan(kept=128, **more):
    """Some tokens' exponentials are kept in the weight's gradient, some in scratch, and some are recomputed.

    Backward is to run in this context too: it makes the plan anew.
    """

    def plan(problem, *_):
        in_gradient = min(kept, triton_memory.capacity(problem))
        return triton_memory.TritonPlan(problem.tokens, 512, 256, in_gradient, kept, **more)

    return _planned(side_effect=plan)


def plan_in_forward(tokens=128, first=0):
    """Forward computes the gradients, by chunks of tokens, of which the first may be larger; where the plan is made
    anew, in backward too.
    """
    rows = 256 if first else 0
    return _planned(
        return_value=triton_memory.TritonPlan(tokens, weight_chunk=rows, in_forward=True, first_chunk=first)
    )


def small_tiles():
    """Tiles of 256 elements, one warp: rows of a few hundred have several."""
    tiles = RowTiles(tile=256, warps=1, programs=1, stages=1)
    return mock.patch.object(row_launches, "heuristic_tiles", return_value=tiles)


@contextmanager
def memory_off_by_256():
    """Memory for exponentials begins at a multiple of 256 bytes, mostly not of 512, as of another allocator."""
    real, starts = triton_setup._allocate, itertools.cycle((256, 256, 0))

    def off(like, shape, dtype):
        start, size = next(starts), math.prod(shape) * dtype.itemsize
        return real(like, (size + start,), torch.uint8)[start:].view(dtype).view(shape)

    with mock.patch.object(triton_setup, "_allocate", off):
        yield


@contextmanager
def nan_filled():
    """What torch.empty and its kin return is NaN, so that an element that nobody wrote shows."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert math.isnan(torch.empty(3)[0])
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = before
