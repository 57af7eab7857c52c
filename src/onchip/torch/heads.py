"""Log-probabilities and divergences of language models, given a head of any class, as `lm_loss` gives their loss."""

import inspect
from typing import Any, Unpack, overload

from torch import Tensor, int64
from torch.nn import Module

from onchip.frontend.options import No, Reduction, ScratchBytes, Yes, check_shift, one_target, require_bool, require_int
from onchip.frontend.topk import TopK
from onchip.frontend.torch_inputs import following, require_tensor
from onchip.frontend.torch_parallel import OfShards
from onchip.frontend.torch_types import Backend
from onchip.ops.linear_cross_entropy.torch_module import computed, found_head, stored_options, with_shift
from onchip.ops.linear_jsd.torch_op import linear_jsd
from onchip.ops.linear_log_probs import LogProbs
from onchip.ops.linear_log_probs.torch_op import LogProbsOfHead, linear_log_probs

LOG_PROBS, JSD = "lm_log_probs", "lm_jsd"
OF_LOG_PROBS = frozenset(inspect.signature(linear_log_probs).parameters)
OF_JSD = frozenset(inspect.signature(linear_jsd).parameters) - {"temperature"}


class OfJsd(OfShards, total=False):
    """The keywords that `lm_jsd` hands on to `linear_jsd`."""

    beta: float
    temperature: float
    temperature_squared: bool
    reduction: Reduction
    normalizer: float | Tensor | None
    teacher_logits: Tensor | None
    teacher_topk: TopK[Tensor] | None
    hard_weight: float
    vocab: int | None
    teacher_grad: bool
    check_inputs: bool
    scratch_bytes: ScratchBytes
    backend: Backend


@overload
def lm_log_probs(
    head: Module, hidden: Tensor, ids: Tensor | None = None, **options: Unpack[LogProbsOfHead[No]]
) -> Tensor: ...
@overload
def lm_log_probs(
    head: Module, hidden: Tensor, ids: Tensor | None = None, **options: Unpack[LogProbsOfHead[Yes]]
) -> LogProbs[Tensor]: ...
@overload
def lm_log_probs(
    head: Module, hidden: Tensor, ids: Tensor | None = None, **options: Unpack[LogProbsOfHead[bool]]
) -> Tensor | LogProbs[Tensor]: ...
def lm_log_probs(
    head: Module,
    hidden: Tensor,  # [..., S, H]
    ids: Tensor | None = None,  # [..., S] or [..., S, K]
    *,
    labels: Tensor | None = None,  # another name for ids
    **options: Any,
) -> Any:
    """Log-probabilities of ids under a language model, without storing the logits: for RL and preference losses.

    The result is exactly that of `linear_log_probs` for the logits that `head(hidden)`, or the model with that head,
    would give; where that can't be, the call raises.

    Args:
        head: an `LMHead`, a `torch.nn.Linear`, PEFT's layer around one of these, or a whole model, wrapped or not, as
            in `lm_loss`.  A scale or softcap that the model applies after its head enters the result.
        hidden: [..., S, H], what the head would be called with: for a model the `last_hidden_state` of its body, as in
            `model.get_decoder()(input_ids).last_hidden_state`.
        ids: [..., S] or [..., S, K] of any integer dtype: the sequence's own tokens.  Position i of the result belongs
            to the id at i + 1, and the last position holds 0.  With shift=False position i belongs to the id at i.
        labels: another name for ids.
        options: arguments of `linear_log_probs`, such as temperature, entropy, lse and ignore_index; they override the
            options of an `LMHead`.  shift is True unless the head says otherwise.  If you pass a head alone, pass its
            model's softcap and logit_scale too; for a whole model they are found, and can't be changed.

    Returns:
        What `linear_log_probs` returns: log_prob of ids' shape in float32 (float64 for float64 inputs), or `LogProbs`.

    Raises:
        What `lm_loss` and `linear_log_probs` raise.

    Memory: that of `linear_log_probs`.  LoRA on the head, with adapters whose ranks add up to r, adds a weight
    [V, H + r] and its gradient.

    Example:
        >>> import torch
        >>> from transformers import Gemma2Config, Gemma2ForCausalLM
        >>> from onchip.torch import lm_log_probs
        >>> config = Gemma2Config(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        ...                       num_attention_heads=2, num_key_value_heads=1, head_dim=8)
        >>> model = Gemma2ForCausalLM(config).eval()
        >>> ids = torch.randint(64, (2, 8))
        >>> hidden = model.get_decoder()(input_ids=ids).last_hidden_state
        >>> log_prob = lm_log_probs(model, hidden, ids)  # [2, 8], with the model's softcap
        >>> plain = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        >>> torch.testing.assert_close(log_prob[:, :-1], plain)

    Sources: as `linear_log_probs`; LoRA (arXiv:2106.09685), for the adapters.
    """
    ids = one_target(LOG_PROBS, ids, labels, name="ids")[1]
    for name, x in (("hidden", hidden), ("ids", ids)):
        require_tensor(LOG_PROBS, name, x)
    head, own = found_head(LOG_PROBS, head, options)
    stored = {name: x for name, x in stored_options(head).items() if name in OF_LOG_PROBS}
    several = ids.ndim == hidden.ndim
    options = with_shift(LOG_PROBS, None if several else ids, stored | own | options)
    sharded = options.get("vocab_group") is not None
    return computed(LOG_PROBS, head, hidden, lambda h, w, b: linear_log_probs(h, w, ids, b, **options), sharded=sharded)


def lm_jsd(
    student: Module,
    student_hidden: Tensor,  # [..., S, Hs]
    teacher: Module | None = None,
    teacher_hidden: Tensor | None = None,  # [..., S, Ht]
    *,
    target: Tensor | None = None,  # [..., S]
    labels: Tensor | None = None,  # another name for target
    shift: bool | None = None,
    ignore_index: int | None = None,
    token_weight: Tensor | None = None,  # [..., S]
    **options: Unpack[OfJsd],
) -> Tensor:
    """Divergence between two language models' next-token distributions, for distillation, without storing logits.

    The result is exactly that of `linear_jsd` for the logits that both heads, or the models with these heads, would
    give; where that can't be, the call raises.

    Args:
        student, teacher: each an `LMHead`, a `torch.nn.Linear`, PEFT's layer around one of these, or a whole model, as
            in `lm_loss`.  Each is used in its state at this call: adapters that are disabled then don't count.
        student_hidden: [..., S, Hs], what the student's head would be called with, as in `lm_loss`.
        teacher_hidden: [..., S, Ht], for the same tokens.  Instead of teacher and teacher_hidden you may pass
            teacher_logits or teacher_topk, which are indexed by hidden position.
        target: [..., S] of any integer dtype, the labels as the data has them: position i counts unless label i + 1 is
            `ignore_index`, and the last position costs nothing.  With shift=False position i counts unless label i is
            `ignore_index`.  Without labels all positions count.
        labels: another name for target.
        shift: whether target and token_weight are indexed by label, and so have to be shifted; True unless the
            student's head, an `LMHead`, says otherwise.
        ignore_index: -100, unless the student's head says otherwise.
        token_weight: [..., S] factor of each token's loss, indexed by label and shifted with it; without labels it is
            indexed by position.
        options: other arguments of `linear_jsd`, such as beta, temperature, hard_weight, teacher_topk and reduction.
            They override the options of a student's `LMHead`.

    Returns:
        What `linear_jsd` returns.

    Raises:
        ValueError: a model or an LMHead has a softcap, as Gemma 2 does, which `linear_jsd` can't compute; pass the
            logits to `jsd`.
        Otherwise what `lm_loss` and `linear_jsd` raise.

    Memory: that of `linear_jsd`.  A head with a logit scale adds a scaled copy of its hidden states; LoRA on a head,
    with adapters whose ranks add up to r, adds a weight [V, H + r] and, for the student, its gradient.

    Example:
        >>> import torch
        >>> from onchip.torch import lm_jsd
        >>> student, teacher = torch.nn.Linear(16, 100, bias=False), torch.nn.Linear(32, 100, bias=False)
        >>> hidden, teacher_hidden = torch.randn(2, 8, 16, requires_grad=True), torch.randn(2, 8, 32)
        >>> labels = torch.randint(100, (2, 8))
        >>> labels[:, :3] = -100  # the prompt
        >>> lm_jsd(student, hidden, teacher, teacher_hidden, labels=labels, beta=0.5).backward()
        >>> student.weight.grad.shape
        torch.Size([100, 16])

    Sources: as `linear_jsd`; LoRA (arXiv:2106.09685), for the adapters.
    """
    target = one_target(JSD, target, labels, needed=False)[1]
    require_tensor(JSD, "student_hidden", student_hidden)
    if (teacher is None) != (teacher_hidden is None):
        raise ValueError(f"{JSD}: teacher and teacher_hidden go together; got one of them")
    student, student_scale, stored = _head_and_scale("student", student)
    said = {name: x for name, x in (("shift", shift), ("ignore_index", ignore_index)) if x is not None}
    of_labels = with_shift(JSD, target, {"ignore_index": -100} | stored | said)
    shift, ignore_index = of_labels["shift"], of_labels["ignore_index"]
    require_bool(JSD, "shift", shift)
    require_int(JSD, "ignore_index", ignore_index)
    if target is not None and shift:
        target, token_weight = _shifted(target, token_weight, ignore_index)
    given: dict[str, Any] = {name: x for name, x in stored.items() if name in OF_JSD} | options
    given |= {"target": target, "token_weight": token_weight, "ignore_index": ignore_index}
    sharded = options.get("vocab_group") is not None

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, **of_teacher: Any) -> Tensor:
        hidden, bias = _scaled(hidden, bias, student_scale)
        return linear_jsd(hidden, weight, student_bias=bias, **of_teacher, **given)

    if teacher is None or teacher_hidden is None:
        return computed(JSD, student, student_hidden, loss, sharded=sharded)
    require_tensor(JSD, "teacher_hidden", teacher_hidden)
    teacher, teacher_scale, _ = _head_and_scale("teacher", teacher)

    def of_both(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        scaled, scaled_bias = _scaled(hidden, bias, teacher_scale)
        names: dict[str, Any] = {"teacher_hidden": scaled, "teacher_weight": weight, "teacher_bias": scaled_bias}
        return computed(JSD, student, student_hidden, lambda *x: loss(*x, **names), sharded=sharded)

    return computed(JSD, teacher, teacher_hidden, of_both, sharded=sharded)


HEAD_ALONE = (
    "pass its head instead, as model.get_output_embeddings(), if its logits are the model's, and as hidden what it is "
    "called with; or pass both models' logits to jsd"
)


def _head_and_scale(whose: str, given: Any) -> tuple[Any, float, dict[str, Any]]:
    """The head, the scale of its logits, and the options that it has if it is an LMHead."""
    head, own = found_head(JSD, given, {}, HEAD_ALONE)
    stored = stored_options(head)
    made = stored | own
    if made.get("softcap") is not None:
        raise ValueError(
            f"{JSD}: the {whose}'s logits have softcap={made['softcap']}, which linear_jsd doesn't compute; pass both "
            "models' logits to jsd"
        )
    return head, made.get("logit_scale", 1.0) / stored.get("temperature", 1.0), stored


def _scaled(hidden: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
    """Hidden states and a bias whose logits are `scale` times as large."""
    if scale == 1:
        return hidden, bias
    return hidden * scale, None if bias is None else bias * scale


def _shifted(target: Tensor, token_weight: Tensor | None, ignore_index: Any) -> tuple[Tensor, Tensor | None]:
    """Labels and their weights, indexed by the position that predicts them."""
    require_tensor(JSD, "target", target)
    check_shift(JSD, True, target.shape, "target of shape [..., S]")
    target = following(target, ignore_index, int64)
    if token_weight is not None:
        require_tensor(JSD, "token_weight", token_weight)
        token_weight = following(token_weight, 0, token_weight.dtype)
    return target, token_weight
