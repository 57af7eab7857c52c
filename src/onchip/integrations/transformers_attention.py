"""transformers: attention under masks that are data, `attn_implementation="onchip"`.

transformers describes a mask as a function of a query's and a key's position, and would evaluate it for all pairs.
Under its models' masks a query sees one range of keys, itself among them; a bisection to either side of itself finds
where the range begins and ends, in O(T log T).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip.attention.masks import Blocked, Causal, Documents, Full, Intervals, Mask, Window
from onchip.core.machine import naming_extra
from onchip.frontend.torch_inputs import has_values
from onchip.torch import attention

NAME = "onchip"
_WHO = "onchip.integrations.transformers"


@dataclass(frozen=True, eq=False)
class SharedMasks:
    """The mask of a forward, for all layers of a kind."""

    mask: Mask

    def contiguous(self) -> "SharedMasks":
        """The mask itself; generation with a static cache calls this on every mask."""
        return self


def register_attention() -> None:
    """Add "onchip" to the attention implementations of transformers, and to its ways of making masks.

    A model takes it with `attn_implementation="onchip"` in from_pretrained or from_config, or with
    `model.set_attn_implementation("onchip")`.  Windows, chunks, softcaps, sinks, packed position_ids, padding, images
    and the keys of a cache are as in its eager attention, except that padding tokens see nothing and their output is 0.
    The mask is made once in each forward and shared by all layers of a kind.

    If a query's keys aren't one range, the mask is evaluated for all pairs, as a bool array [B, Tq, Tk].  To find that
    out, each mask is compared with its function on the CPU; on other devices this is done only if the model or the
    caller has a mask function of its own.

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
    if more.get("output_attentions"):
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

    see = mask_function or masking_utils.causal_mask_function
    padding = None
    if attention_mask is not None:
        padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if padding is not None:
            see = masking_utils.and_masks(see, masking_utils.padding_mask_function(padding))
    rows = torch.arange(q_length, device=device)[None].expand(batch_size, -1) + q_offset
    of_batch = torch.arange(batch_size, device=device)[:, None].expand_as(rows)

    def sees(j: Tensor) -> Tensor:
        """Whether each query sees key number j, if there is such a key."""
        made: Tensor = see(of_batch, torch.zeros_like(of_batch), rows, j + kv_offset)
        return made.to(torch.bool).expand(rows.shape)

    def by_pairs() -> Tensor:
        made = masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function or masking_utils.causal_mask_function,
            attention_mask, allow_is_causal_skip=False, use_vmap=more.get("use_vmap", False), device=device,
        )  # fmt: skip
        pairs: Tensor = made[:, 0].expand(batch_size, -1, -1)
        return pairs

    own = rows - kv_offset
    try:
        ranges = _ranges(sees, own, kv_length)
    except (RuntimeError, TypeError, ValueError, IndexError):  # it isn't a function of arrays of positions
        return SharedMasks(Blocked(by_pairs(), 1))
    known = all(_is_known(leaf) for leaf in _leaves(mask_function)) if mask_function is not None else True
    if known and not (rows.device.type == "cpu" and has_values(rows)):
        return SharedMasks(ranges)
    pairs, j = by_pairs(), torch.arange(kv_length, device=device)
    same = (((ranges.start[..., None] <= j) & (j < ranges.end[..., None])) == pairs).all(2)
    if padding is not None and padding.shape[-1] >= kv_length:  # padding needs to see nothing
        there = (own >= 0) & (own < kv_length)
        same |= there & ~padding.to(torch.bool).gather(1, own.clamp(0, kv_length - 1))
    return SharedMasks(ranges if bool(same.all()) else Blocked(pairs, 1))


def _ranges(sees: Callable[[Tensor], Tensor], own: Tensor, keys: int) -> Intervals:
    """The first key and the one past the last that each query sees, around its own; nothing where it can't see that."""
    first, last = own.clamp(0, keys - 1), own.clamp(0, keys - 1)
    there = sees(first) & (own == first)
    low, high = torch.zeros_like(own), torch.full_like(own, keys - 1)
    for _ in range(keys.bit_length()):
        middle = (low + first) // 2
        seen = sees(middle)
        first, low = torch.where(seen, middle, first), torch.where(seen, low, torch.minimum(middle + 1, first))
        middle = (last + high + 1) // 2
        seen = sees(middle)
        last, high = torch.where(seen, middle, last), torch.where(seen, high, torch.maximum(middle - 1, last))
    return Intervals(first, torch.where(there, last + 1, first))


def _leaves(function: Any) -> Iterator[Any]:
    """The functions from which a mask's function is combined."""
    inner = [
        part
        for cell in getattr(function, "__closure__", None) or ()
        for part in (cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,))
        if callable(part) and not isinstance(part, Tensor)
    ]
    if not inner or not _is_known(function):
        yield function
    for part in inner:
        yield from _leaves(part)


def _is_known(function: Any) -> bool:
    """Whether the function is one of transformers' own, whose masks are ranges."""
    return getattr(function, "__module__", "") == "transformers.masking_utils"
