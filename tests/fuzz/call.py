"""One random call: its inputs, the op, the oracle, and the comparison of both."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import numpy as np

from fuzz.draw import Call, table
from fuzz.judge import CONSTANTS, assert_right, compare
from onchip.frontend.topk import TopK
from onchip.oracle.checks import Check, adapter
from onchip.registry import OPS

# Options that the oracle doesn't know.
_OWN_OPTIONS = (
    "return_stats", "strategy", "check_inputs", "inplace_backward", "weight_layout", "weight_grad_out", "precision",
    "entropy", "lse", "top1", "mean_logits", "log_sum_sq_probs", "teacher_grad", "layout",
)  # fmt: skip


def program(call: Call) -> str:
    """Python code that runs the call alone; values that it doesn't name are the simplest ones."""
    first = _simplest(call)
    named = [f"{name}={value!r}" for name, value in call.items() if name not in first or value != first[name]]
    return f"from fuzz.call import check\n\ncheck({', '.join(named)})\n"


def check(**values: Any) -> None:
    """Run a call in which values that are not given are the simplest."""
    run({**_simplest(values), **values})


def _simplest(call: Call) -> dict[str, Any]:
    return {name: values[0] for name, values in table(call["framework"], call["op"]).items()}


def run(call: Call) -> list[Check]:
    """Compare what a call gives with the oracle; raise `Wrong` if it is out of bounds, or what the call raises."""
    framework, device, family, dtype = call["framework"], call["device"], call["op"], call["dtype"]
    op = "jsd" if call.get("student") == "logits" else family
    parts = ("checks", "checks") if OPS[family].loss else ("cases", "reference")
    cases, reference = (import_module(f"onchip.ops.{family}.{part}") for part in parts)
    calls, fw = import_module(f"fuzz.{framework}_calls"), adapter(framework)
    of = getattr(import_module(f"onchip.{framework}"), op)

    kind = type(cases.CHECK_CASES[0])
    first, of_case = _simplest(call), kind.__dataclass_fields__
    changed = {name: value for name, value in call.items() if name in first and value != first[name]}
    if "softcap" in changed and "logit_std" in first:
        changed["softcap"] = call["softcap"] * 4 * call["logit_std"] * call["logit_scale"]
    own = {name: changed[name] for name in _OWN_OPTIONS if name in changed}
    known = signature(of).parameters.keys() - of_case.keys() - own.keys()
    options = {name: value for name, value in changed.items() if name in known}
    if call.get("padded"):
        options["vocab"] = call["vocab"]
    case = kind(name="fuzz", options=options, **_fields(call, of_case))
    made = cases.make_inputs(case, seed=call["seed"])
    if call.get("poison"):
        unread = _without_group if family == "grouped_matmul" else _with_ignored
        made = made._replace(**unread(made._asdict(), call, np.float32(np.nan)))
    if call.get("offsets"):
        of = partial(_by_offsets, of)
    oracle_of = getattr(reference, op)
    if family == "attention":
        mask = case.make_mask(lambda x: fw.constant(x, device))
        of, oracle_of = partial(_attention, of, mask), partial(oracle_of, seen=case.seen())

    with fw.default_device(device):
        given = _shaped(made, call, calls.array)
        numbers = {name: fw.as_array(x) for name, x in given.items() if name != "teacher_topk"}
        flat = {name: x.reshape(np.shape(getattr(made, name))) for name, x in numbers.items()}
        if topk := given.get("teacher_topk"):
            parts = [fw.as_array(x) for x in topk[:2]]
            numbers["teacher_topk"] = (*parts, *topk[2:])
            flat["teacher_topk"] = (*(x.reshape(-1, x.shape[-1]) for x in parts), *topk[2:])
        oracle = oracle_of(**numbers, **options)
        leaves = [name for name in given if _gets_gradient(name, call)]
        results = calls.results(of, given, {**options, **own, "backend": call["backend"]}, call, leaves)
    checks = compare(
        case,
        dtype,
        {name: fw.as_array(x) for name, x in results.items()},
        oracle,
        flat | _with_ignored(flat, call, 0),
        options,
        tensor_cores=family == "fp8_linear" and device == "cuda" and call["backend"] not in ("dequantize", "xla"),
        fp8=call.get("precision") == "fp8",
    )
    assert_right(checks)
    return checks


def _fields(call: Call, known: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the op's case."""
    fields: dict[str, Any] = {}
    if "shape" in call:
        tokens = math.prod(call["shape"])
        fields = {"m": tokens, "snr_db": None} if "m" in known else {"tokens": tokens}
    if call.get("padded"):
        fields["padding"] = (8, 3)
    return fields | {name: value for name, value in call.items() if name in known}


def _with_ignored(arrays: Mapping[str, Any], call: Call, value: Any) -> dict[str, Any]:
    """Hidden states and logits of a case's arrays, with `value` in the rows of ignored tokens."""
    labels = next((arrays[name] for name in ("target", "ids") if arrays.get(name) is not None), None)
    if labels is None:
        return {}
    ignored = (labels.reshape(len(labels), math.prod(labels.shape[1:])) == call["ignore_index"]).all(1)
    floats = {name: x for name, x in arrays.items() if name.endswith(("hidden", "logits")) and x is not None}
    return {name: np.where(ignored[:, None], value, x) for name, x in floats.items()}


def _without_group(arrays: Mapping[str, Any], call: Call, value: Any) -> dict[str, Any]:
    """Inputs of grouped_matmul with `value`, or an index out of range, in all that no row of a group reads."""
    last, groups = sum(call["sizes"]), np.array(call["sizes"]) > 0
    read, write = (slice(last) if arrays[n] is None else arrays[n][:last] for n in ("rows", "scatter_rows"))
    kept = {"x": read, "grad_out": write, "weight": groups, "bias": groups}
    kept |= dict.fromkeys(("row_scale", "rows", "scatter_rows"), slice(last))
    made = {}
    for name in kept:
        if (x := arrays[name]) is not None:
            made[name] = np.full_like(x, value if x.dtype.kind == "f" else -1)
            made[name][kept[name]] = x[kept[name]]
    return made


def _by_offsets(op: Callable[..., Any], *, group_sizes: Any, **more: Any) -> Any:
    """The op, given where groups end."""
    return op(group_offsets=group_sizes.cumsum(0, dtype=group_sizes.dtype), **more)


def _attention(
    op: Callable[..., Any], mask: Any, *, q: Any, k: Any, v: Any, layout: str = "bthd", lse: bool = False, **more: Any
) -> dict[str, Any]:
    """What the op returns, by name and in the layout of its arguments here, which is [B, T, H, D]."""

    def turned(x: Any) -> Any:
        return x.swapaxes(1, 2) if layout == "bhtd" else x

    made = op(turned(q), turned(k), turned(v), mask, layout=layout, return_lse=lse, **more)
    return dict(zip(("out", "lse"), map(turned, made if lse else (made,)), strict=False))


def _shaped(made: Any, call: Call, array: Callable[[str, Any, str | None, Call], Any]) -> dict[str, Any]:
    """The arrays of the inputs of a case with the call's shape for their tokens, upstream gradients among them."""
    shape: Any = call.get("shape")
    given: dict[str, Any] = {}
    for name, x in made._asdict().items():
        # Of linear_log_probs, a value that is not asked for has no upstream gradient.
        if x is None or (name in ("grad_entropy", "grad_lse") and not call[name.removeprefix("grad_")]):
            continue
        if name == "topk":
            parts = (array(name, part.reshape(*shape, part.shape[-1]), None, call) for part in x[:2])
            given["teacher_topk"] = TopK(*parts, *x[2:])
            continue
        per_token = name == "token_weight" or not name.endswith(("weight", "bias"))
        if shape is not None and per_token and np.ndim(x):
            x = np.reshape(x, (*shape, *np.shape(x)[1:]))
        given[name] = array(name, x, _dtype(name, call), call)
    return given


def _dtype(name: str, call: Call) -> str | None:
    """The call's dtype of an array, None if it is kept as it is."""
    if name in ("target", "ids"):
        return str(call["label_dtype"])
    if name in ("group_sizes", "rows", "scatter_rows"):
        return str(call["index_dtype"])
    if name in ("bias", "row_scale") and call.get("others_dtype"):
        return str(call["others_dtype"])
    return None if name in CONSTANTS or (name.startswith("grad_") and name != "grad_out") else str(call["dtype"])


def _gets_gradient(name: str, call: Call) -> bool:
    """Whether the call asks for a gradient of this array."""
    who, _, part = name.rpartition("_")
    if name in (*CONSTANTS, "teacher_topk") or name.startswith("grad_"):
        return False
    if who == "teacher":
        return bool(call["teacher_grad"])
    order = {"logits": 0, "hidden": 0, "x": 0, "weight": 1, "bias": 2, "scale": 3, "q": 0, "k": 1, "v": 2, "sinks": 3}
    return not call["frozen"] >> order[part] & 1
