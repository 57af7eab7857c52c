"""Which tile is next: from a counter in device memory, and from one warpgroup of a program to the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from onchip.kernels.mosaic.ptx import add_one, put

_AHEAD = 4  # times that are told before all have heard them, at most


@dataclass(frozen=True)
class Counter:
    """One warpgroup of each program takes numbers.

    The counter is 0 before a kernel and after it: the last number that is taken sets it to 0 again.  In a scan XLA may
    fuse the kernel with a slice that it reads or writes, and then takes the counter for a constant (jaxlib 0.11.2,
    dynamic slice fusion).
    """

    counter: Any
    """[1] int32 of device memory."""
    drawn: Any
    taken: Any

    @staticmethod
    def shared() -> dict[str, Any]:
        """Shared memory and barriers by the names of fields."""
        return {"drawn": plgpu.SMEM((1,), jnp.int32), "taken": plgpu.Barrier(num_arrivals=1)}

    def take(self, all_numbers: Any) -> Any:
        """all_numbers: how many are taken, by all programs together."""
        add_one(self.counter, self.drawn, all_numbers - 1)
        plgpu.barrier_arrive(self.taken)
        plgpu.barrier_wait(self.taken)
        return self.drawn[0]


@dataclass(frozen=True)
class Broadcast:
    """One warpgroup tells numbers, and each of the others hears them: the x-th time those that were told the x-th."""

    said: Any
    told: Any
    heard: Any
    interpret: Any

    @staticmethod
    def shared(numbers: int, hearers: int) -> dict[str, Any]:
        """Shared memory and barriers by the names of fields."""
        return {
            "said": plgpu.SMEM((_AHEAD, numbers), jnp.int32),
            "told": plgpu.Barrier(num_arrivals=1, num_barriers=_AHEAD),
            "heard": plgpu.Barrier(num_arrivals=hearers, num_barriers=_AHEAD),
        }

    def begin(self) -> None:
        """What each that hears does first."""
        for slot in range(_AHEAD):
            plgpu.barrier_arrive(self.heard.at[slot])

    def end(self) -> None:
        """What the one that tells does last: wait until all has been heard."""
        for slot in range(_AHEAD):
            plgpu.barrier_wait(self.heard.at[slot])

    def tell(self, x: Any, numbers: Sequence[Any]) -> None:
        slot = lax.rem(x, jnp.int32(_AHEAD))
        plgpu.barrier_wait(self.heard.at[slot])
        put(self.said.at[slot], numbers, self.interpret)
        plgpu.barrier_arrive(self.told.at[slot])

    def hear(self, x: Any) -> list[Any]:
        slot = lax.rem(x, jnp.int32(_AHEAD))
        plgpu.barrier_wait(self.told.at[slot])
        numbers = [self.said[slot, i] for i in range(self.said.shape[1])]
        plgpu.barrier_arrive(self.heard.at[slot])
        return numbers
