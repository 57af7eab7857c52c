"""Registers functions as PyTorch's operators, for torch.compile and for tensors that a mode or a transform watches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

# It lives as long as its operators may be called.
_LIBRARY = torch.library.Library("onchip", "FRAGMENT")


def operator(
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    changed: Sequence[int] = (),
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> Any:
    """The operator onchip::`schema`, as `torch.library.custom_op` makes one, but for what takes the host longest.

    custom_op finds the arguments that a call changes in Python, in a time that grows with the square of their number
    (0.2 ms for 27), and looks in each call for results that share memory with arguments.

    Args:
        function: what it runs on any device.
        fake: the same for tensors without memory.
        changed: the places of arguments that it changes.
        backward, setup_context: as `torch.library.register_autograd` takes them.
    """
    _LIBRARY.define(schema, tags=[torch.Tag.pt2_compliant_tag])
    name = schema.partition("(")[0]
    made = getattr(torch.ops.onchip, name).default

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def run(*args: Any) -> Any:
        return function(*args)

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"onchip::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"onchip::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    if changed:

        def change(*args: Any) -> Any:
            for i in changed:
                if args[i] is not None:
                    torch.autograd.graph.increment_version(args[i])
            with torch._C._AutoDispatchBelowADInplaceOrView():
                return made(*args)

        _LIBRARY.impl(name, change, "ADInplaceOrView")
    return made
