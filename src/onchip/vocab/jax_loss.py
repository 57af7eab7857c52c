"""The operator of a loss over a vocabulary in JAX, of a linear layer or of logits that exist: all that is around the
walks of a backend and is the same for every loss.

A call's parameters are an `XlaProjection` with hidden [..., H], or logits [..., V].  Its constants are the op's own; on
a device they become arrays by token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from onchip.core.backends import choose_backend
from onchip.frontend.jax_call import Planned, Static
from onchip.frontend.jax_inputs import accumulator
from onchip.frontend.jax_spread import Between, with_gradients_on_mesh
from onchip.vocab.jax_ways import MODULES, ROWS, each, refusals, row_plan, row_refusals, way_to
from onchip.vocab.rows.memory import RowsProblem
from onchip.vocab.xla import loss
from onchip.vocab.xla.loss import LossCall
from onchip.vocab.xla.parallel import split_as
from onchip.vocab.xla.tiles import Wanted, XlaProjection, XlaTokenStats

Source = XlaProjection | jax.Array


@dataclass(frozen=True)
class JaxLoss:
    """A loss: functions of a call's `Static`, and of its constants by token."""

    op: str
    """The name that errors begin with."""
    constants: Callable[[Static, Any, int, Any, tuple[str, ...]], Any]
    """(static, given, tokens, dtype, axes): the constants by token, from those of the call, in the dtype of sums; a
    mean is over the tokens of all devices along the mesh axes."""
    problem: Callable[[Static, Any, bool], dict[str, Any]]
    """(static, constants, of a layer): fields of the problem, on which plans and refusals depend."""
    call: Callable[[Static, Any, Any, Callable[[jax.Array], Any]], LossCall]
    """(static, constants, source, select): the call in the form that a backend takes, for the source `source()` and the
    rows `select(labels)`."""
    wanted: Callable[[Static, Any], Wanted]
    """(static, constants): the statistics that the outputs need."""
    outputs: Callable[[Static, LossCall, XlaTokenStats, Any], Any]
    """(static, call, statistics, sums): what the public function returns."""
    gradient: Callable[[Static, Any, Any], Any] | None = None
    """(static, what is saved, upstream): the gradient of each row's logits; None: that of a cross-entropy."""
    of_logits: str = ""
    """The name of the op for logits, if it is another one."""
    resumes: Callable[[Any], bool] = lambda constants: True
    """Whether each token's lse and its ids' log-probabilities are, with the arguments, all that backward needs."""

    def operator(self, **between: Callable[..., Any]) -> Any:
        """`between` are further fields of its `Between`."""
        how = Between(keep=self._keep, resume=self._resume, **between)
        names = ", ".join(filter(None, (self.op, self.of_logits)))
        return with_gradients_on_mesh(names, self.forward, self.backward, self._on_device, how)

    def _name(self, of: Source) -> str:
        return self.op if isinstance(of, XlaProjection) else self.of_logits or self.op

    def _on_device(self, static: Static, of: Source, given: Any) -> tuple[Static, Any, Any]:
        """The arguments of `forward`."""
        axes = () if static.mesh is None else static.mesh.spread.tokens
        elsewhere: tuple[str, ...] = ()
        flat: Any
        if isinstance(of, XlaProjection):
            static, flat = split_as(static, of.vocab), of.flat()
            constants = self.constants(static, given, len(flat.hidden), flat.accumulator, axes)
            problem = self._problem(static, flat, constants, XlaProjection(True, True, flat.bias is not None))
            reasons = refusals(problem, static.platform, flat.layout, static.options.strategy, static.shard)
            elsewhere = () if static.shard else ("triton",)
        else:
            vocab = of.shape[-1]
            static, tokens = split_as(static, vocab), of.size // vocab
            constants = self.constants(static, given, tokens, accumulator(of.dtype), axes)
            flat = of.reshape(tokens, vocab)
            reasons = row_refusals(self._problem(static, flat, constants, True), static.platform)
        backend = choose_backend(self._name(of), static.backend, reasons, elsewhere)
        return static._replace(backend=backend), flat, constants

    def _problem(self, static: Static, of: Source, constants: Any, needs: Any) -> Any:
        """The problem, given which gradients are needed."""
        if isinstance(of, XlaProjection):
            known = self.problem(static, constants, True)
            return of.problem(needs, static.platform, split=static.shard is not None, **known)
        device, grad = "cpu" if static.platform == "cpu" else "cuda", any(jax.tree.leaves(needs))
        known = self.problem(static, constants, False)
        return RowsProblem(len(of), of.shape[1], of.dtype.name, device, grad, **known)

    def _planned(self, static: Static, needs: Any, of: Source, constants: Any) -> tuple[ModuleType, Any, LossCall]:
        """The backend, its plan, and the call."""
        problem, budget = self._problem(static, of, constants, needs), static.options.scratch_bytes
        backend: ModuleType
        plan: Any
        if isinstance(of, XlaProjection):
            backend, source = MODULES[static.backend], lambda: of
            split = static.backend == "xla" and static.shard is not None
            again = static.recompute or split or not self.resumes(constants)
            plan = backend.plan(problem, "recompute" if again else static.options.strategy, budget)
        else:
            backend = ROWS[static.backend]
            once = static.fused and not static.recompute and static.shard is None
            once = once and self.gradient is None and static.options.reduction != "none"
            source, plan = partial(backend.of_logits, of), row_plan(problem, static.backend, budget, once=once)
        return backend, plan, self.call(static, constants, source, partial(backend.select, plan))

    def forward(self, static: Static, needs: Any, of: Source, constants: Any) -> tuple[Any, Planned | None]:
        if static.shard is not None:
            static.shard.refuse_untracked(self._name(of), needs)
        backend, plan, call = self._planned(static, needs, of, constants)
        stats, sums, saved = each(backend, partial(backend.forward, plan, self.wanted(static, constants), needs))(call)
        made = self.outputs(static, call, stats, sums)
        return made, None if saved is None else self._saved(of, saved, plan)

    def backward(self, static: Static, needs: Any, saved: Planned, upstream: Any) -> Any:
        """The gradients of the layer, or that of the logits [T, V]."""
        (of, known), backend = saved.arrays, MODULES[static.backend]
        if of is not None:
            backend, source = way_to(static.backend, of)
            known = known._replace(call=known.call._replace(source=source))
        if self.gradient is None:
            of_loss = jnp.zeros(()) if upstream.loss is None else upstream.loss
            return each(backend, partial(backend.backward, saved.plan, needs))(known, of_loss)
        gradient = self.gradient(static, known, upstream)
        return each(backend, partial(backend.gradients, saved.plan, needs))(known, gradient)

    def _saved(self, of: Source, saved: Any, plan: Any) -> Planned:
        if isinstance(of, XlaProjection) and self.gradient is None:  # they may be gradients already
            return Planned((None, saved), plan)
        # The source as it came: for 16-bit logits `call.source` may be a copy.
        return Planned((of, saved._replace(call=saved.call._replace(source=None))), plan)

    def _keep(self, static: Static, saved: Planned, of: Source, constants: Any) -> XlaTokenStats | None:
        _, known = saved.arrays
        return known.stats.by_token(known.call.tokens) if self.resumes(constants) else None

    def _resume(
        self, static: Static, needs: Any, kept: XlaTokenStats | None, of: Source, constants: Any
    ) -> Planned | None:
        if kept is None:
            return None
        backend, plan, call = self._planned(static, needs, of, constants)
        return self._saved(of, backend.Saved(call, kept.by_row(call.tokens)), plan)


def cross_entropy(op: str) -> JaxLoss:
    """The loss of a cross-entropy, whose constants are a `Given`."""

    def problem(static: Static, constants: loss.Constants, of_layer: bool) -> dict[str, Any]:
        known = {"stats": static.options.return_stats, **constants.problem()}
        return known | ({"per_token_loss": static.options.reduction == "none"} if of_layer else {})

    def call(static: Static, constants: loss.Constants, source: Any, select: Any) -> LossCall:
        tokens = select(constants.kept)
        return constants.call(static.options.reduction, source(), tokens, static.shard)

    return JaxLoss(
        op,
        lambda static, given, tokens, dtype, axes: loss.Constants.of(given, static.options, dtype, axes),
        problem,
        call,
        wanted=lambda static, constants: constants.wanted(static.options.return_stats),
        outputs=lambda static, call, stats, sums: call.outputs(static.options.reduction, stats, sums),
        resumes=lambda constants: constants.probs is None,
    )
