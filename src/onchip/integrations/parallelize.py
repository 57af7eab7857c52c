"""The plan of an `LMHead` for PyTorch's `parallelize_module`.

`HeadParallel` takes the place of `ColwiseParallel` for the head.
"""

from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import Module, Parameter

from onchip.torch import LMHead

NAME = "onchip.integrations.parallelize"


class HeadParallel(ColwiseParallel):
    """`ColwiseParallel` for an `LMHead`: each rank has rows of its weight, and `head(hidden, labels)` gives the loss.

    The loss is that of the whole vocabulary, a plain tensor with the same bits on every rank.  Hidden states may stay
    sharded by tokens: the loss gathers them, and backward scatters their gradient.  The logits, from `head(hidden)`,
    are laid out as by `ColwiseParallel`.

    Args:
        input_layouts: layout of hidden states that are plain tensors: `Replicate()`, the default, or `Shard` of a
            dimension of tokens.  A DTensor has its own.
        output_layouts, use_local_output: layout of the logits, as in `ColwiseParallel`.

    Raises:
        TypeError: when the plan is applied, the module is no `LMHead`.
        Otherwise, when the head is called, what `linear_cross_entropy` raises.

    Example, with hidden states from a norm that is `SequenceParallel()`::

        from onchip.integrations.parallelize import HeadParallel

        parallelize_module(model, mesh["tp"], {"norm": SequenceParallel(), "lm_head": HeadParallel()})
        loss = model.lm_head(model.norm(x), labels)

    Source: PyTorch, `torch/distributed/tensor/parallel/style.py`, for the style that it follows.
    """

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        if not isinstance(module, LMHead):
            raise TypeError(
                f"{NAME}: HeadParallel is for an LMHead; got {type(module).__name__}; replace the head by "
                "LMHead.from_linear(head) first, or use ColwiseParallel and pass its logits to cross_entropy"
            )
        distribute_module(module, device_mesh, self._shard)
        module.register_forward_pre_hook(partial(self._lay_out, device_mesh), with_kwargs=True)
        module.register_forward_hook(self._finish)
        return module

    def _shard(self, name: str, module: Module, device_mesh: DeviceMesh) -> None:
        for key, p in list(module.named_parameters(recurse=False)):
            rows = distribute_tensor(p, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(key, Parameter(rows, requires_grad=p.requires_grad))

    def _lay_out(self, device_mesh: DeviceMesh, module: Module, given: Any, named: Any) -> Any:
        """The arguments of a call, with hidden states as a DTensor."""
        named = dict(zip(("input", "labels"), given, strict=False)) | named
        hidden = named["input"]
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, device_mesh, self.input_layouts, run_check=False)
        if named.get("labels") is None:
            hidden = hidden.redistribute(placements=[Replicate()])
        return (), named | {"input": hidden}

    def _finish(self, module: Module, given: Any, made: Any) -> Any:
        """The logits as they were asked for; a loss as it is."""
        if not isinstance(made, DTensor):
            return made
        logits = made.redistribute(placements=self.output_layouts)
        return logits.to_local() if self.use_local_output else logits
