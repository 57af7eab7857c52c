"""Which tile is next: numbers from a counter in device memory, passed from one warpgroup of a program to the others."""

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
    """A counter from which one warpgroup of each program takes numbers.

    The counter is 0 before a kernel and after it: whoever takes the last number sets it to 0 again.  In a scan XLA may
    fuse the kernel with a slice that it reads or writes, and then takes the counter for a constant (jaxlib 0.11.2,
    dynamic slice fusion).
    """

    counter: Any
    """[1] int32 of device memory."""
    drawn: Any
    taken: Any

    @staticmethod
    def shared() -> dict[str, Any]:
        """Shared memory and barriers, by the names of the fields."""
        return {"drawn": plgpu.SMEM((1,), jnp.int32), "taken": plgpu.Barrier(num_arrivals=1)}

    def take(self, all_numbers: Any) -> Any:
        """Take a number.  all_numbers: how many are taken, by all programs together."""
        add_one(self.counter, self.drawn, all_numbers - 1)
        plgpu.barrier_arrive(self.taken)
        return self.taken_number()

    def taken_number(self) -> Any:
        """The number that was taken, in any warpgroup, if each of a program takes one."""
        plgpu.barrier_wait(self.taken)
        return self.drawn[0]


@dataclass(frozen=True)
class Broadcast:
    """One warpgroup sends numbers, and each of the others receives them: in its x-th turn, what was sent in the
    x-th.
    """

    said: Any
    told: Any
    heard: Any
    interpret: Any

    @staticmethod
    def shared(numbers: int, hearers: int) -> dict[str, Any]:
        """Shared memory and barriers, by the names of the fields."""
        return {
            "said": plgpu.SMEM((_AHEAD, numbers), jnp.int32),
            "told": plgpu.Barrier(num_arrivals=1, num_barriers=_AHEAD),
            "heard": plgpu.Barrier(num_arrivals=hearers, num_barriers=_AHEAD),
        }

    def begin(self) -> None:
        """What each receiver does first."""
        for slot in range(_AHEAD):
            plgpu.barrier_arrive(self.heard.at[slot])

    def end(self) -> None:
        """What the sender does last: wait until everything has been received."""
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
