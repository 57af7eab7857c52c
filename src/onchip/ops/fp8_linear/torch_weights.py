"""The cache of quantised weights: a weight is quantised once for all micro-batches between two changes of it.

A weight's copies are kept as long as the weight is, and used only while it is what they were made of.  What can change
a weight, and how that is seen:

- Operations in place, `load_state_dict`, `copy_`: the tensor's version counter.
- Another tensor in `.data`: another storage, told apart by a weak reference to it, since an address may be used again.
- An optimizer whose kernels write past the version counter, and sharding that gathers a weight anew into the same
  memory without counting: each step of any `torch.optim.Optimizer` makes the copies of all trainable weights old.
- Another stream: copies are used on the stream that made them.  While a CUDA graph is captured nothing is taken from
  here or put here: a replay must quantise what the weight has become.

What writes to a weight in none of these ways, such as `weight.data.copy_`, must be followed by `forget_weight`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from onchip.fp8.torch_quantize import Quantized

Quantizer = Callable[..., tuple[Quantized | None, Quantized | None]]


class _State(NamedTuple):
    """What a weight is at one time."""

    storage: int
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    version: int
    steps: int
    stream: int
    scale: str
    quantizer: str


class _Entry(NamedTuple):
    state: _State
    storage: StorageWeakRef
    rows: Quantized | None
    transposed: Quantized | None


class _Cache:
    """Entries by weight, and how often an optimizer has stepped since the first was made."""

    def __init__(self) -> None:
        self.entries = WeakTensorKeyDictionary()
        self.steps = 0
        self.listening = False

    def listen(self) -> None:
        if not self.listening:
            register_optimizer_step_post_hook(self._stepped)
            self.listening = True

    def _stepped(self, *_: Any) -> None:
        self.steps += 1


_CACHE = _Cache()


def quantized_weight(
    weight: Tensor,  # [N, K]
    scale: str,
    quantize: Quantizer,
    quantizer: str,
    *,
    rows: bool,
    transposed: bool,
    cache: bool,
) -> tuple[Quantized | None, Quantized | None]:
    """The weight in FP8, and its transpose, where asked for: from the cache, or by `quantize`, named `quantizer`."""
    if not (cache and _may_keep(weight)):
        return quantize(weight.detach(), scale, rows=rows, transposed=transposed)
    state = _state(weight, scale, quantizer)
    entry: _Entry | None = _CACHE.entries.get(weight)
    if entry is not None and (entry.state != state or entry.storage.expired()):
        entry = None
    kept = (None, None) if entry is None else (entry.rows, entry.transposed)
    missing = [rows and kept[0] is None, transposed and kept[1] is None]
    if any(missing):
        made = quantize(weight.detach(), scale, rows=missing[0], transposed=missing[1])
        kept = (kept[0] or made[0], kept[1] or made[1])
        _CACHE.listen()
        _CACHE.entries[weight] = _Entry(state, StorageWeakRef(weight.untyped_storage()), *kept)
    return kept


def forget_weight(weight: Tensor) -> None:
    """Drop the quantised copies of `weight` that `fp8_linear` keeps; the next call quantises it anew.

    Needed after writing to a weight past PyTorch's bookkeeping, as `weight.data.copy_(...)` and kernels of your own do,
    unless a step of a `torch.optim.Optimizer` comes before the weight is used again.  Frees their memory, too.

    Args:
        weight: [N, K], the tensor that was passed to `fp8_linear`; nothing happens if it has no copies.

    Raises:
        TypeError: weight is no tensor.

    Example:
        >>> import torch
        >>> from onchip.torch import Fp8Linear, forget_weight
        >>> layer = Fp8Linear(16, 8)
        >>> layer(torch.randn(2, 16)).shape
        torch.Size([2, 8])
        >>> layer.weight.data.zero_()[0, 0]
        tensor(0.)
        >>> forget_weight(layer.weight)
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"forget_weight: weight must be a torch.Tensor; got {type(weight).__name__}")
    _CACHE.entries.pop(weight, None)


def _may_keep(weight: Tensor) -> bool:
    if weight.is_inference():  # which count no versions
        return False
    return not (weight.is_cuda and torch.cuda.is_current_stream_capturing())


def _state(weight: Tensor, scale: str, quantizer: str) -> _State:
    return _State(
        weight.untyped_storage()._cdata,
        int(weight.storage_offset()),
        weight.shape,
        weight.stride(),
        weight.dtype,
        weight._version,
        _CACHE.steps if weight.requires_grad else -1,
        torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0,
        scale,
        quantizer,
    )
