"""A counter in device memory from which the programs of a kernel take numbers: Pallas has no operation for it.

It is 0 before a kernel and after it: the last number that is taken sets it to 0 again.  XLA may make one operation of
the kernel and a slice that it reads or writes, as in a scan, and then takes the counter for a constant (jaxlib 0.11.2,
dynamic slice fusion).
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from onchip.kernels.mosaic.ptx import add_one

_AHEAD = 4  # numbers that are told before all have heard them, at most


@dataclass(frozen=True)
class Counter:
    """One warpgroup of a program takes numbers, and each hears them, itself too; number x of a program is its x-th."""

    counter: Any
    """[1] int32 of device memory, 0."""
    said: Any
    told: Any
    heard: Any

    @staticmethod
    def shared(warpgroups: int) -> dict[str, Any]:
        """Shared memory and barriers by the names of fields."""
        return {
            "said": plgpu.SMEM((_AHEAD,), jnp.int32),
            "told": plgpu.Barrier(num_arrivals=1, num_barriers=_AHEAD),
            "heard": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=_AHEAD),
        }

    def begin(self) -> None:
        """What each warpgroup does first."""
        for slot in range(_AHEAD):
            plgpu.barrier_arrive(self.heard.at[slot])

    def take(self, x: Any, number: Any) -> Any:
        """number: how many are taken in all."""
        slot = lax.rem(x, jnp.int32(_AHEAD))
        plgpu.barrier_wait(self.heard.at[slot])
        add_one(self.counter, self.said.at[pl.ds(slot, 1)], number - 1)
        plgpu.barrier_arrive(self.told.at[slot])
        return self.hear(x)

    def hear(self, x: Any) -> Any:
        slot = lax.rem(x, jnp.int32(_AHEAD))
        plgpu.barrier_wait(self.told.at[slot])
        number = self.said[slot]
        plgpu.barrier_arrive(self.heard.at[slot])
        return number
