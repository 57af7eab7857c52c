"""Small calls of every loss in float64, for derivatives by finite differences: one list for PyTorch and JAX."""

from typing import NamedTuple

import numpy as np
import torch

from onchip.torch import TopK

TOKENS, HIDDEN, VOCAB = 5, 4, 7


class Example(NamedTuple):
    op: str
    leaves: dict
    """Arguments that have gradients."""
    options: dict


def examples(of_targets):
    """By name; `of_targets` is what the front end calls targets.  Arrays are NumPy's; a `TopK` is a tuple."""
    rng = np.random.default_rng(0)
    normal, positive = rng.standard_normal, lambda *shape: 0.5 + rng.random(shape)
    layer = {"hidden": normal((TOKENS, HIDDEN)), "weight": normal((VOCAB, HIDDEN)), "bias": normal(VOCAB)}
    logits = {"logits": normal((TOKENS, VOCAB))}
    target, ids = np.array([0, 3, -100, 6, 2]), np.array([[0, 3], [1, 1], [-100, -100], [4, -100], [5, 6]])
    dense = positive(TOKENS, VOCAB).astype(np.float32)  # whose numbers float64 holds
    k = np.stack([rng.permutation(VOCAB)[:3] for _ in range(TOKENS)])
    probs = (k, positive(TOKENS, 3), "probs", "truncated")
    weights = {"token_weight": positive(TOKENS), "class_weight": positive(VOCAB)}
    numbers = {"softcap": 3.1, "logit_scale": 1.3, "temperature": positive(TOKENS)}
    loss = weights | numbers | {"label_smoothing": 0.1, "z_loss": 0.01}
    asked = numbers | dict.fromkeys(("entropy", "lse"), True)
    teacher = {"teacher_hidden": normal((TOKENS, 3)), "teacher_weight": normal((VOCAB, 3))}
    student = {f"student_{name}": x for name, x in layer.items()}
    both = {"student_logits": logits["logits"], "teacher_logits": normal((TOKENS, VOCAB))}
    hard = {of_targets: target, "hard_weight": 0.3, "token_weight": positive(TOKENS), "temperature": 1.7}
    log_probs = np.log(positive(TOKENS, 3) / 9)
    made = {
        f"cross_entropy {name}": Example("cross_entropy", logits, loss | {of_targets: x})
        for name, x in {"ids": target, "dense": dense, "top-k": probs}.items()
    }
    for how in ({"strategy": "stash"}, {"strategy": "recompute"}, {"reduction": "none"}):
        options = loss | how | {of_targets: target}
        made[f"linear_cross_entropy {how}"] = Example("linear_cross_entropy", layer, options)
    for name, x in {"dense": dense, "top-k": probs}.items():
        made[f"linear_cross_entropy {name}"] = Example("linear_cross_entropy", layer, loss | {of_targets: x})
    made["linear_log_probs"] = Example("linear_log_probs", layer, asked | {"ids": ids})
    made["log_probs"] = Example("log_probs", logits, asked | {"ids": ids})
    for beta in (0.0, 0.3, 1.0):
        options = hard | {"beta": beta, "teacher_grad": True}
        made[f"linear_jsd beta={beta}"] = Example("linear_jsd", student | teacher, options)
    made["jsd"] = Example("jsd", both, hard | {"beta": 0.3, "teacher_grad": True})
    made["linear_jsd top-k"] = Example(
        "linear_jsd", student, hard | {"teacher_topk": (k, log_probs, "log_probs", "tail")}
    )
    return made


def differentiable(made):
    """The outputs that have gradients, of what an op returned."""
    return (made.log_prob, made.entropy, made.lse) if hasattr(made, "log_prob") else made


def as_torch(x, **more):
    """Arrays as tensors, a tuple as a `TopK` of them."""
    if isinstance(x, tuple):
        return TopK(*map(as_torch, x))
    return torch.tensor(x, **more) if isinstance(x, np.ndarray) else x
