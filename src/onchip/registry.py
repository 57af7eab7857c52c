"""The ops, each registered once: a line here, and entries in its folder that commands, tests and docs go through.

The folder `onchip/ops/<name>/` has these modules.  Each is imported when it is asked for, and none imports a framework:

- `checks.py`: `CHECKER`, the cases and their float64 oracle, and `plain_refusals`, why a backend can't run;
- `bench.py`: `TORCH` and `JAX`, the benchmark with its steps and peers, and `WORLD`, its version for several
  processes; an op may lack some of these;
- `plan.py`: `PLAN`, the backends and costs that `onchip plan` shows;
- the folder's `__init__.py`, beside the op's maths, options and checks of shapes: `CALLS`, functions of `onchip.torch`,
  with inputs for which `warm_up` compiles their kernels.
"""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True)
class Op:
    """One op."""

    name: str
    loss: bool = False
    """Whether it is a loss over a vocabulary."""
    warms_up: bool = True
    """Whether it has `CALLS`."""

    def entry(self, path: str) -> Any:
        """The object at "module:name", the module "module", or the object "name" of the op's `__init__.py`."""
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
