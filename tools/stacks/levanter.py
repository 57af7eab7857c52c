"""Levanter: its kernels' loss."""

import importlib
import importlib.util
import sys
import types
import unittest.mock
from typing import Any

from stacks.common import Checked, StandIns, agreed, tests, tokens


def levanter() -> Checked:
    import jax
    import jax.numpy as jnp
    import numpy as np

    # The package imports a trainer and all that it needs; its kernels import where tuned sizes are stored, and what
    # several hosts need.
    spec = importlib.util.find_spec("levanter")
    package = types.ModuleType("levanter")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["levanter"] = package
    sys.meta_path.insert(0, StandIns(("finestore", "rigging", "levanter.utils")))  # type: ignore[arg-type]
    vars(importlib.import_module("finestore.cache"))["PersistentKvCache"] = unittest.mock.MagicMock()
    from levanter.kernels.pallas.fused_cross_entropy_loss import api

    from onchip.integrations import levanter as integration

    x, w = jax.random.normal(jax.random.key(0), (32, 16)), jax.random.normal(jax.random.key(1), (16, 96))
    labels = jnp.asarray(tokens().flatten().numpy())
    weight = jnp.arange(32) / 32

    def step(implementation: str | None) -> list[Any]:
        def loss(x: Any, w: Any) -> Any:
            return api.fused_cross_entropy_loss_and_logsumexp_penalty(
                x, labels, w, weight=weight, logsumexp_weight=1e-2, logit_soft_cap=3.0, implementation=implementation
            )

        return [np.asarray(x) for x in jax.tree.leaves(jax.value_and_grad(loss, (0, 1))(x, w))]

    integration.register(default=True)
    errors = [agreed(step(name), step("reference")) for name in ("onchip", None)]
    integration.unregister()
    how = f"its kernels' loss by name and by default, against its 'reference', loss and gradients: {max(errors):.0e}"
    return "`IMPLEMENTATIONS`, `_default_implementations`", f"{how}; {tests('levanter')}"
