"""The ops, each registered once: one line here, and entries in its folder that commands, tests and docs walk over.

The folder `onchip/ops/<name>/` has, each imported when it is asked for and none of them a framework:

- `checks.py`: `CHECKER`, the cases beside the float64 oracle, and `plain_refusals`, why a backend can't run;
- `bench.py`: `TORCH` and `JAX`, the benchmark with its steps and peers, and `WORLD`, that of several processes, of
  those that there are;
- `plan.py`: `PLAN`, the backends and costs that `onchip plan` shows;
- `warm_up.py`: `CALLS`, functions of `onchip.torch` with inputs that make them compile their kernels.
"""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True)
class Op:
    """One op."""

    name: str
    loss: bool = False
    """Whether it is one over a vocabulary."""
    warms_up: bool = True
    """Whether it has a `warm_up.py`."""

    def entry(self, path: str) -> Any:
        """What is at "module:name", or "module", in its folder."""
        return resolve_name(f"onchip.ops.{self.name}.{path}")


_EVERY = (
    Op("linear_cross_entropy", loss=True),
    Op("linear_log_probs", loss=True),
    Op("cross_entropy", loss=True),
    Op("linear_jsd", loss=True),
    Op("fp8_linear"),
    Op("grouped_matmul"),
    Op("collective_matmul", warms_up=False),
    Op("attention", warms_up=False),
)

OPS = {op.name: op for op in _EVERY}
