"""One random call: its inputs, the op, the oracle, and the comparison of both."""

import math
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from onchip.fuzz.draw import Call, table
from onchip.fuzz.judge import CONSTANTS, assert_right, compare
from onchip.ops.linear_jsd.spec import TopK
from onchip.oracle.checks import Check, adapter

# Options that the oracle knows too.
_LOSS_OPTIONS = (
    "ignore_index", "reduction", "normalizer", "label_smoothing", "z_loss", "softcap", "logit_scale", "temperature",
)  # fmt: skip
_ORACLE_OPTIONS = {
    "linear_cross_entropy": _LOSS_OPTIONS,
    "cross_entropy": _LOSS_OPTIONS,
    "linear_log_probs": ("ignore_index", "softcap", "logit_scale", "temperature"),
    "linear_jsd": (
        "beta", "temperature", "temperature_squared", "ignore_index", "reduction", "normalizer", "hard_weight",
    ),
    "fp8_linear": ("grad_dtype", "scale"),
}  # fmt: skip
# Options of the ops alone.
_OWN_OPTIONS = (
    "return_stats", "strategy", "check_inputs", "inplace_backward", "weight_layout", "precision",
    "entropy", "lse", "top1", "teacher_grad",
)  # fmt: skip


def program(call: Call) -> str:
    """Python code that runs the call alone; values that it doesn't name are the simplest ones."""
    first = _simplest(call)
    named = [f"{name}={value!r}" for name, value in call.items() if name not in first or value != first[name]]
    return f"from onchip.fuzz.call import check\n\ncheck({', '.join(named)})\n"


def check(**values: Any) -> None:
    """Run a call in which values that are not given are the simplest."""
    run({**_simplest(values), **values})


def _simplest(call: Call) -> dict[str, Any]:
    return {name: values[0] for name, values in table(call["framework"], call["op"]).items()}


def run(call: Call) -> list[Check]:
    """Compare what a call gives with the oracle; raise `Wrong` if it is out of bounds, or what the call raises."""
    framework, device, family, dtype = call["framework"], call["device"], call["op"], call["dtype"]
    op = "jsd" if call.get("student") == "logits" else family
    cases, reference = (import_module(f"onchip.ops.{family}.{part}") for part in ("cases", "reference"))
    calls, fw = import_module(f"onchip.fuzz.{framework}_calls"), adapter(framework)

    first = _simplest(call)
    changed = {name: value for name, value in call.items() if name in first and value != first[name]}
    if "softcap" in changed:
        changed["softcap"] = call["softcap"] * 4 * call["logit_std"] * call["logit_scale"]
    options = {name: changed[name] for name in _ORACLE_OPTIONS[family] if name in changed}
    if call.get("padded"):
        options["vocab"] = call["vocab"]
    own = {name: changed[name] for name in _OWN_OPTIONS if name in changed}
    case = cases.Case(name="fuzz", options=options, **_fields(call, cases.Case.__dataclass_fields__))
    made = cases.make_inputs(case, seed=call["seed"])
    if call.get("poison"):
        made = _poisoned(made, call["ignore_index"])

    with fw.default_device(device):
        given = _shaped(made, call, calls.array)
        numbers = {name: fw.as_array(x) for name, x in given.items() if name != "teacher_topk"}
        if topk := given.get("teacher_topk"):
            numbers["teacher_topk"] = (fw.as_array(topk.indices), fw.as_array(topk.values), topk.kind, topk.rest)
        oracle = getattr(reference, op)(**numbers, **options)
        leaves = [name for name in given if _gets_gradient(name, call)]
        of = getattr(import_module(f"onchip.{framework}"), op)
        results = calls.results(of, given, {**options, **own, "backend": call["backend"]}, call, leaves)
    checks = compare(
        case,
        dtype,
        {name: fw.as_array(x) for name, x in results.items()},
        oracle,
        numbers,
        options,
        tensor_cores=family == "fp8_linear" and device == "cuda" and call["backend"] not in ("dequantize", "xla"),
        fp8=call.get("precision") == "fp8",
    )
    assert_right(checks)
    return checks


def _fields(call: Call, known: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the op's case."""
    tokens = math.prod(call["shape"])
    fields: dict[str, Any] = {"m": tokens, "snr_db": None} if "m" in known else {"tokens": tokens}
    if call.get("padded"):
        fields["padding"] = (8, 3)
    return fields | {name: value for name, value in call.items() if name in known}


def _poisoned(made: Any, ignore_index: int) -> Any:
    """The inputs of a case with NaN in what ignored tokens hold."""
    labels = made.target if hasattr(made, "target") else made.ids
    if labels is None or not labels.size:
        return made
    ignored = (np.reshape(labels, (len(labels), -1)) == ignore_index).all(1)
    names = [n for n in made._fields if n.endswith(("hidden", "logits")) and getattr(made, n) is not None]
    return made._replace(**{n: np.where(ignored[:, None], np.float32(np.nan), getattr(made, n)) for n in names})


def _shaped(made: Any, call: Call, array: Callable[[str, Any, Call], Any]) -> dict[str, Any]:
    """The arrays of the inputs of a case with the call's shape for their tokens, upstream gradients among them."""
    shape = call["shape"]
    given: dict[str, Any] = {}
    for name, x in made._asdict().items():
        # Of linear_log_probs, a value that is not asked for has no upstream gradient.
        if x is None or (name in ("grad_entropy", "grad_lse") and not call[name.removeprefix("grad_")]):
            continue
        if name == "topk":
            parts = (array(name, part.reshape(*shape, part.shape[-1]), call) for part in x[:2])
            given["teacher_topk"] = TopK(*parts, *x[2:])
            continue
        per_token = name == "token_weight" or not name.endswith(("weight", "bias"))
        given[name] = array(name, np.reshape(x, (*shape, *np.shape(x)[1:])) if per_token and np.ndim(x) else x, call)
    return given


def _gets_gradient(name: str, call: Call) -> bool:
    """Whether the call asks for a gradient of this array."""
    who, _, part = name.rpartition("_")
    if name in (*CONSTANTS, "teacher_topk") or name.startswith("grad_"):
        return False
    if who == "teacher":
        return bool(call["teacher_grad"])
    order = {"logits": 0, "hidden": 0, "x": 0, "weight": 1, "bias": 2}
    return not call["frozen"] >> order[part] & 1
