"""transformers: attention under masks that are data, `attn_implementation="onchip"`.

transformers describes a mask as a function of a query's and a key's position, and would evaluate it for all pairs.
Under its models' masks a query sees one range of keys, around the key that is next to it; a bisection to either side of
that finds where the range begins and ends, in O(T log T).  Padding before and after the tokens ends the ranges; padding
among them is hidden from all queries by `stop`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from onchip.attention.masks import (
    Blocked,
    Causal,
    Documents,
    Full,
    Intervals,
    Mask,
    Window,
    mask_arrays,
    with_arrays,
)
from onchip.core.machine import naming_extra
from onchip.frontend.torch_inputs import has_values
from onchip.torch import attention

NAME = "onchip"
_WHO = "onchip.integrations.transformers"
_RANGES = {
    "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay", "chunked_overlay",
    "sliding_window_bidirectional_overlay", "blockwise_overlay", "packed_sequence_mask_function",
}  # fmt: skip
"""transformers' functions by which a query sees one range of keys, its own among them, if ids don't come back."""
_COMBINED = {"and_masks", "or_masks", "remap_positions_for_packed_sequence"}
"""Those that combine others; what such ranges have in common is a range, and together they are one."""


@dataclass(frozen=True, eq=False)
class SharedMasks(BlockMask):
    """The mask of a forward, for all layers of a kind.

    transformers passes a mask on as it is if it is a `BlockMask` of four dimensions; generation with a static cache
    makes masks before it calls the model.
    """

    mask: Mask
    shape: tuple[int, ...] = ()

    def contiguous(self) -> "SharedMasks":
        """The mask itself; generation with a static cache calls this on every mask."""
        return self

    def to(self, device: Any, non_blocking: bool = False) -> "SharedMasks":
        """The mask on another device; accelerate calls this where a model's layers are on several."""
        arrays = [x.to(device, non_blocking=non_blocking) for x in mask_arrays(self.mask)]
        return SharedMasks(with_arrays(self.mask, iter(arrays)), self.shape)

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError(f"{_WHO}: the model reads its mask; use attn_implementation='eager'")

    def __str__(self) -> str:
        return repr(self)


def register_attention() -> None:
    """Add "onchip" to the attention implementations of transformers, and to its ways of making masks.

    A model takes it with `attn_implementation="onchip"` in from_pretrained or from_config, or with
    `model.set_attn_implementation("onchip")`.  Windows, chunks, softcaps, sinks, packed position_ids, padding, images
    and the keys of a cache are as in its eager attention.  Only a query without keys has output 0, and so may padding
    before and after the tokens of a causal mask.
    The mask is made once in each forward and shared by all layers of a kind.  As in transformers, an attention_mask
    [B, T] takes the place of packed position_ids: pass one of them.

    If a query's keys aren't one range, the mask is evaluated for all pairs, as a bool array [B, Tq, Tk].  To find that
    out, each mask is compared with its function on the CPU.  On other devices this is done only if the model or the
    caller has a mask function of its own; under torch.compile such masks, and those of blocks, are all evaluated for
    pairs.

    Call it once in each process, before a model asks for it.

    Raises:
        ImportError: transformers isn't installed, or has no `AttentionMaskInterface`.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from onchip.integrations.transformers import register_attention
        >>> register_attention()
        >>> config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        ...                      num_attention_heads=2, num_key_value_heads=1)
        >>> config._attn_implementation = "onchip"
        >>> model = LlamaForCausalLM(config)
        >>> ids = torch.randint(64, (1, 8))
        >>> packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
        >>> model(input_ids=ids, position_ids=packed, use_cache=False).logits.shape
        torch.Size([1, 8, 64])
    """
    with naming_extra(_WHO, "torch,integrations"):
        from transformers import AttentionInterface, AttentionMaskInterface
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


def attention_forward(
    module: Any,
    query: Tensor,  # [B, H, Tq, D]
    key: Tensor,  # [B, Hk, Tk, D]
    value: Tensor,  # [B, Hk, Tk, Dv]
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The function that `register_attention` registers: it returns [B, Tq, H, Dv] and None for the probabilities.

    Args:
        attention_mask: the result of `make_mask`; bool [B or 1, 1, Tq, Tk]; or None, for a causal mask if the module
            says so, within sliding_window.
        s_aux: the sinks.
        more: cu_seq_lens_q and cu_seq_lens_k give documents; a position_bias or a head_mask is refused.

    Raises:
        NotImplementedError: there is dropout, a bias, a mask of numbers, or cu_seq_lens with several rows.
    """
    for name in ("position_bias", "head_mask"):
        if more.get(name) is not None:
            raise NotImplementedError(f"{_WHO}: {type(module).__name__} has a {name}; use attn_implementation='eager'")
    if dropout:
        raise NotImplementedError(f"{_WHO}: attention has no dropout; set the config's attention_dropout to 0")
    by_config = getattr(getattr(module, "config", None), "output_attentions", False)
    if more.get("output_attentions", by_config):
        raise NotImplementedError(f"{_WHO}: probabilities are never stored; use attn_implementation='eager'")
    batch, _, queries, _ = query.shape
    keys = key.shape[2]
    if attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        mask = _without_mask(bool(causal), sliding_window, queries, keys)
    elif isinstance(attention_mask, SharedMasks):
        mask = attention_mask.mask
    else:
        mask = _of_matrix(attention_mask)
    lengths, of_keys = more.get("cu_seq_lens_q"), more.get("cu_seq_lens_k")
    if lengths is not None:
        if batch != 1 or queries != keys or (of_keys is not None and of_keys.shape != lengths.shape):
            raise NotImplementedError(f"{_WHO}: cu_seq_lens_q needs one row of tokens, the same for queries and keys")
        mask = mask & Documents.from_cu_seqlens(lengths, keys)
    made = attention(
        query, key, value, mask, scale=scaling, softcap=softcap, sinks=s_aux, layout="bhtd"
    )  # fmt: skip
    return made.transpose(1, 2), None


def _without_mask(causal: bool, window: int | None, queries: int, keys: int) -> Mask:
    if not causal or queries == 1:
        return Full() if window is None else Window(window - 1, None if causal else window - 1, keys - queries)
    if queries != keys:
        raise NotImplementedError(
            f"{_WHO}: no mask was made for {queries} queries and {keys} keys; call register_attention"
        )
    return Causal() if window is None else Window(window - 1)


def _of_matrix(mask: Tensor) -> Mask:
    """The mask for what a caller passes in place of [B, T]: bool [B or 1, 1, Tq, Tk]."""
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1] != 1:
        raise NotImplementedError(
            f"{_WHO}: a mask in place of [B, T] must be bool [B, 1, Tq, Tk]; got {mask.dtype} {list(mask.shape)}; a "
            "mask that is added to scores needs attn_implementation='eager'"
        )
    return Blocked(mask[:, 0], 1)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **more: Any,
) -> SharedMasks:
    """What `register_attention` registers for masks, with transformers' arguments: it makes ranges, or else pairs."""
    from transformers import masking_utils

    function = mask_function or masking_utils.causal_mask_function
    rows = torch.arange(q_length, device=device)[None].expand(batch_size, -1) + q_offset
    of_batch, keys = torch.arange(batch_size, device=device)[:, None], torch.arange(kv_length, device=device)
    own, shape = rows - kv_offset, (batch_size, 1, q_length, kv_length)

    def sees(j: Tensor) -> Tensor:
        """Whether each query sees key number j, if there is such a key."""
        made: Tensor = function(of_batch.expand_as(rows), torch.zeros_like(rows), rows, j + kv_offset)
        return made.to(torch.bool).expand(rows.shape)

    def by_pairs() -> Tensor:
        made = masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask, allow_is_causal_skip=False,
            use_vmap=more.get("use_vmap", False), device=device,
        )  # fmt: skip
        pairs: Tensor = made[:, 0].expand(batch_size, -1, -1)
        return pairs

    bands: dict[Any, Mask] = {masking_utils.bidirectional_mask_function: Full()}
    if isinstance(q_offset, int):
        bands[masking_utils.causal_mask_function] = Causal(q_offset - kv_offset)
    if attention_mask is None and function in bands:
        return SharedMasks(bands[function].lower(batch_size, q_length, kv_length, rows), shape)
    there = None  # [B, Tk]: whether a key is no padding
    if attention_mask is not None:
        padded = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        there = padded[:, keys + kv_offset].to(torch.bool).expand(batch_size, -1)
    first, end = _span(there, own, kv_length)
    leaves = list(_leaves(function))
    try:
        ranges = _ranges(sees, own, first, end, kv_length)
    except (RuntimeError, TypeError, ValueError, IndexError):  # it isn't a function of arrays of positions
        return SharedMasks(Blocked(by_pairs(), 1), shape)
    skipped = torch.zeros_like(own, dtype=torch.bool)
    if there is not None:
        if q_length == kv_length and masking_utils.causal_mask_function in leaves:  # queries and keys are the same
            skipped = (own < first) | (own >= end)
        holes = ~there & (keys >= first) & (keys < end)
        stop = torch.where(holes, 0, q_length) if not _is_at_hand(rows) or bool(holes.any()) else None
        ranges = Intervals(ranges.start, torch.where(skipped, ranges.start, ranges.end), stop)
    ranges = ranges.lower(batch_size, q_length, kv_length, rows)
    if not _is_at_hand(rows) and _is_one_range(leaves, bool(more.get("use_vmap")), first, end, kv_offset, kv_length):
        return SharedMasks(ranges, shape)
    pairs = by_pairs()
    made = (ranges.start[..., None] <= keys) & (keys < ranges.end[..., None])
    made = made if there is None else made & there[:, None]
    if has_values(rows) and bool(((made == pairs).all(2) | skipped).all()):
        return SharedMasks(ranges, shape)
    return SharedMasks(Blocked(pairs, 1), shape)


def _is_at_hand(x: Tensor) -> bool:
    """Whether its numbers can be read without waiting for a GPU."""
    return x.device.type == "cpu" and has_values(x)


def _span(there: Tensor | None, own: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """[B, 1] of each sequence: the first key that is no padding, and the one past the last."""
    if there is None:
        return torch.zeros_like(own[:, :1]), torch.full_like(own[:, :1], keys)
    j = torch.arange(keys, device=there.device)
    end = torch.where(there, j + 1, 0).amax(1, keepdim=True)
    return torch.minimum(torch.where(there, j, keys).amin(1, keepdim=True), end), end


def _ranges(sees: Callable[[Tensor], Tensor], own: Tensor, begin: Tensor, end: Tensor, keys: int) -> Intervals:
    """The first key and the one past the last that each query sees, among those from `begin` to `end`, around the one
    that is next to its own; nothing if it doesn't see that."""
    first = last = torch.minimum(torch.maximum(own, begin), end - 1).clamp(min=0)
    there = sees(first) & (begin < end)
    low, high = begin.expand_as(own), (end - 1).clamp(min=0).expand_as(own)
    for _ in range(keys.bit_length()):
        middle = (low + first) // 2
        seen = sees(middle)
        first, low = torch.where(seen, middle, first), torch.where(seen, low, torch.minimum(middle + 1, first))
        middle = (last + high + 1) // 2
        seen = sees(middle)
        last, high = torch.where(seen, middle, last), torch.where(seen, high, torch.maximum(middle - 1, last))
    return Intervals(first, torch.where(there, last + 1, first))


def _is_one_range(leaves: list[Any], given: bool, begin: Tensor, end: Tensor, offset: int, keys: int) -> bool:
    """Whether a mask of these functions, some of them the caller's if `given`, lets each query see one range of the
    keys from `begin` to `end`.  It waits for the device where ids may come back."""
    names = [_name(leaf) for leaf in leaves]
    if not has_values(begin):  # the functions that are combined can't be looked at, but only blocks take or_masks
        return not given and set(names) <= (_RANGES - {"blockwise_overlay"}) | {"and_masks"}
    if not set(names) <= _RANGES:
        return False
    at = torch.arange(keys, device=begin.device)
    for leaf, name in zip(leaves, names, strict=True):
        if name != "blockwise_overlay" and not (given and name == "packed_sequence_mask_function"):
            continue
        ids = leaf.__closure__[0].cell_contents[:, at + offset].to(begin.device)
        least = ids.amin().clamp(max=0) - 1
        least = least if name == "packed_sequence_mask_function" else -torch.ones_like(least)  # below 0 is no block
        ids = torch.where((at >= begin) & (at < end), ids, least)
        begins = ids != torch.cat([least.expand_as(ids[:, :1]), ids[:, :-1]], 1)
        found = torch.where(begins & (ids > least), ids, least - 1 - at).sort(1).values
        if not bool((found[:, 1:] != found[:, :-1]).all()):
            return False
    return True


def _leaves(function: Any) -> Iterator[Any]:
    """The functions from which a mask's function is combined by transformers' own."""
    if _name(function) not in _COMBINED or torch.compiler.is_compiling():  # which can't look into functions
        yield function
        return
    for cell in function.__closure__:
        parts = cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,)
        for part in parts:
            if callable(part) and not isinstance(part, Tensor):
                yield from _leaves(part)


def _name(function: Any) -> str:
    """The name of one of transformers' own functions, or of the one that made it; empty for others."""
    if getattr(function, "__module__", "") != "transformers.masking_utils" or not hasattr(function, "__code__"):
        return ""
    name: str = function.__code__.co_qualname  # torch.compile doesn't know __qualname__
    return name.partition(".")[0]
