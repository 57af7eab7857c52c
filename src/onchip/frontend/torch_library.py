"""Registers functions as PyTorch's operators, for torch.compile and for tensors that a mode or a transform watches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

# By the operator's name.  An operator lives as long as its library, and may outlive this module, which may be loaded
# again.
_LIBRARIES: dict[str, torch.library.Library] = vars(torch.ops.onchip).setdefault("libraries", {})


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
    name = schema.partition("(")[0]
    _LIBRARIES.pop(name, None)
    library = _LIBRARIES[name] = torch.library.Library("onchip", "FRAGMENT")
    library.define(schema, tags=[torch.Tag.pt2_compliant_tag])
    made = getattr(torch.ops.onchip, name).default

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def run(*args: Any) -> Any:
        return function(*args)

    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"onchip::{name}", fake, lib=library)
    if backward is not None:
        torch.library.register_autograd(f"onchip::{name}", backward, setup_context=setup_context, lib=library)
    if changed:

        def change(*args: Any) -> Any:
            for i in changed:
                if args[i] is not None:
                    torch.autograd.graph.increment_version(args[i])
            with torch._C._AutoDispatchBelowADInplaceOrView():
                return made(*args)

        library.impl(name, change, "ADInplaceOrView")
    return made
