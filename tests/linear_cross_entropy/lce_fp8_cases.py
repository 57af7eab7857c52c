"""What the tests of precision='fp8' share: problems, and how far from the oracle results may be."""

import numpy as np
import torch

from onchip.ops.fp8_linear.reference import snr_db
from onchip.ops.linear_cross_entropy.checks import CHECKER, Case, make_inputs
from onchip.torch import TopK, linear_cross_entropy

# Of a mean over tokens, and of the gradients: what FP8 may cost.
LOSS_ERROR = 1e-3
GRADIENT_DB = 25.0


def case(name, *sizes, **more):
    fields = {k: more.pop(k) for k in list(more) if k in Case.__dataclass_fields__}
    return Case(name, *sizes, **fields, options=more)


# T, H and V that are ragged in blocks of 128, of one block and of several.
CASES = (
    case("aligned", 256, 256, 512),
    case("ragged", 150, 136, 400, bias=True, ignored=0.3),
    case("small", 40, 24, 200),
    case("zipf", 260, 128, 2000, zipf=True, logit_std=2.0),
    case("peaked", 260, 256, 3000, target_prob=0.9),
    case("sum", 130, 64, 1000, reduction="sum"),
    case("per token", 260, 64, 1000, reduction="none"),
    case("all ignored", 130, 64, 300, ignored=1.0),
    case("masked vocab", 130, 64, 1000, masked=600),
    case("softcap", 130, 64, 1000, logit_std=4.0, softcap=15.0),
    case("everything", 140, 64, 300, bias=True, ignored=0.3, token_weight=True, token_temperature=True,
         label_smoothing=0.1, z_loss=1e-3, softcap=15.0, logit_scale=0.5, normalizer=100),
    case("classes", 150, 64, 300, bias=True, ignored=0.3, class_weight=True, token_weight=True, label_smoothing=0.3,
         z_loss=1e-3, softcap=15.0),
    case("classes, z-loss", 130, 64, 1000, class_weight=True, z_loss=1e-2, reduction="none"),
)  # fmt: skip


def results(case, dtype, device="cpu", **how):
    """(results, oracle): loss, statistics and gradients, by the names of the oracle's fields."""
    inputs = make_inputs(case)
    arguments, keywords = CHECKER.as_arguments(case, inputs, dtype, device)
    if case.options.get("reduction") == "none" and arguments[3] is not None:
        arguments[3].requires_grad_(False)
    oracle = CHECKER.run_oracle(arguments, keywords, inputs)
    loss, stats = linear_cross_entropy(*arguments, **keywords, precision="fp8", return_stats=True, **how)
    loss.backward(torch.from_numpy(np.asarray(inputs.grad_loss)).to(device))
    made = {"loss": loss, **stats._asdict()}
    names = ("hidden", "weight", "bias")
    leaves = (arguments[0], arguments[1], arguments[3])
    made |= {f"grad_{n}": x.grad for n, x in zip(names, leaves, strict=True) if x is not None and x.grad is not None}
    return {name: x.detach().double().cpu().numpy() for name, x in made.items()}, oracle


def assert_near(case, dtype, device="cpu", **how):
    """The loss, and both gradients, within what FP8 may cost; zeros where zeros belong."""
    made, oracle = results(case, dtype, device, **how)
    # Where the target is nearly certain, of a loss that is so much smaller, and of fewer tokens than are trained on.
    loss_error = LOSS_ERROR if case.target_prob is None else 4 * LOSS_ERROR
    assert abs(made["loss"].sum() - oracle.loss.sum()) <= loss_error * abs(oracle.loss.sum())
    ignored = oracle.lse == 0
    for name in ("lse", "log_prob", "entropy", "correct", "grad_hidden"):
        assert (made[name][ignored] == 0).all(), name
    for name in ("lse", "entropy"):
        error = np.linalg.norm(made[name] - getattr(oracle, name))
        assert error <= 0.01 * case.logit_std * np.linalg.norm(getattr(oracle, name)), name
    for name in ("grad_hidden", "grad_weight", "grad_bias"):
        if name in made:
            assert snr_db(made[name], getattr(oracle, name)) >= GRADIENT_DB, name


def soft_problem(form, tokens, hidden, vocab, *, ids=6, device="cpu", dtype=torch.float32):
    """Arguments by name, with labels as a teacher has them: of K ids, of which the last is the first one again, or of
    every entry, that lie in memory by columns."""
    g = torch.Generator().manual_seed(0)
    h, w, b = (torch.randn(*shape, generator=g) for shape in ((tokens, hidden), (vocab, hidden), (vocab,)))
    layer = {"hidden": h, "weight": w / hidden**0.5, "bias": b}
    layer = {name: x.to(device=device, dtype=dtype).requires_grad_() for name, x in layer.items()}
    probs = (3 * torch.randn(tokens, vocab, generator=g)).softmax(-1)
    if form == "dense":
        return layer | {"target": probs.T.contiguous().T.to(device=device, dtype=dtype)}
    values, indices = probs.topk(ids)
    indices[:, -1] = indices[:, 0]
    values = values.log() if form == "log_probs" else values
    return layer | {"target": TopK(indices.to(device), values.to(device=device, dtype=dtype), form, "truncated")}


def of_every_kind(tokens, vocab, device="cpu"):
    """Options of soft labels."""
    each = torch.linspace(0.5, 1.5, tokens, device=device)
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 15.0, "logit_scale": 0.5, "temperature": each}
    weights = {"token_weight": each.flip(0), "class_weight": torch.linspace(0, 2, vocab, device=device)}
    return options | weights | {"normalizer": 100.0}


def soft_results(given, options, **how):
    """Loss, statistics and gradients of soft labels, by name, in float64."""
    loss, stats = linear_cross_entropy(**given, **options, precision="fp8", return_stats=True, **how)
    made = {name: x for name, x in {"loss": loss, **stats._asdict()}.items() if name not in ("correct", "argmax")}
    leaves = {name: x for name, x in given.items() if torch.is_tensor(x) and x.requires_grad}
    grads = torch.autograd.grad(loss.sum(), list(leaves.values()))
    made |= {f"grad_{name}": g for name, g in zip(leaves, grads, strict=True)}
    return {name: x.detach().double().cpu().numpy() for name, x in made.items()}


def assert_alike(made, right, value_bound, gradient_bound):
    """Two backends' results, by the relative norms of their differences."""
    assert made.keys() == right.keys()
    for name, x in right.items():
        bound = gradient_bound if name.startswith("grad_") else value_bound
        assert np.linalg.norm(made[name] - x) <= bound * np.linalg.norm(x), name
