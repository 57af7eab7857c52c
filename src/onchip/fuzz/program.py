"""A random call as a program of its own: what is run is what is printed."""

import math
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from onchip.fuzz.draw import Call, table
from onchip.oracle.checks import Check

_JSD_ORACLE = ("beta", "temperature", "temperature_squared", "ignore_index", "reduction", "normalizer", "hard_weight")
_LOSS_ORACLE = (
    "ignore_index", "reduction", "normalizer", "label_smoothing", "z_loss", "softcap", "logit_scale", "temperature",
)  # fmt: skip
# Options that the oracle knows too.
ORACLE = {
    "linear_cross_entropy": _LOSS_ORACLE,
    "cross_entropy": _LOSS_ORACLE,
    "linear_log_probs": ("ignore_index", "softcap", "logit_scale", "temperature"),
    "linear_jsd": _JSD_ORACLE,
    "fp8_linear": ("grad_dtype", "scale"),
}
# Options of the ops alone.
OTHERS = (
    "return_stats", "strategy", "check_inputs", "inplace_backward", "weight_layout", "precision",
    "entropy", "lse", "top1", "teacher_grad",
)  # fmt: skip
_LAYOUT = (
    "label_dtype", "autocast", "strides", "weight_strides", "constant_strides", "upstream_strides",
)  # fmt: skip
_TRACED = {"linear_jsd": ("normalizer",)}


def program(call: Call) -> str:
    """Python code that makes the inputs, calls the op and compares its results with the oracle's."""
    framework, family, dtype = call["framework"], call["op"], call["dtype"]
    op = "jsd" if call.get("student") == "logits" else family
    given = {**call, **_derived(call)}
    first = {name: values[0] for name, values in table(framework, family).items()}

    def changed(names: Any) -> dict[str, Any]:
        return {n: given[n] for n in names if n in given and (n not in first or given[n] != first[n])}

    options = changed(ORACLE[family]) | ({"vocab": call["vocab"]} if call.get("padded") else {})
    fields = {"name": "fuzz", **_fields(call)}
    others = changed(OTHERS) | {"backend": call["backend"]}
    frozen = _frozen(call)
    traced = {}
    if call.get("traced"):
        names = _TRACED.get(family, ORACLE[family])
        traced = {n: options[n] for n in names if isinstance(options.get(n), float)}
    layout: dict[str, Any] = changed(_LAYOUT)
    how: dict[str, Any] = changed(("scratch", "again", "twice"))
    module = f"onchip.ops.{family}"
    lines = [
        f"from onchip.fuzz import {framework}_calls as calls",
        "from onchip.fuzz.judge import assert_right, compare, poisoned",
        f"from {module} import reference",
        f"from {module}.cases import Case, make_inputs",
        f"from onchip.{framework} import {op}",
        "",
        f"case = Case({_arguments({**fields, 'options': options})})",
        f"made = make_inputs(case, seed={call['seed']})",
    ]
    if call.get("poison"):
        lines += [f"made = poisoned(made, {call['ignore_index']})"]
    if framework == "torch":
        layout |= {"frozen": frozen} if frozen else {}
        layout |= {"inplace": True} if call.get("inplace_backward") else {}
        lines += [f"given = calls.arrays(made, {call['shape']}, {dtype!r}, {call['device']!r}{_more(layout)})"]
        if call.get("weight_grad_out"):
            how["weight_grad_out"] = others["weight_grad_out"] = _Code("total")
            lines += ["total = torch.zeros_like(given['weight'], dtype=torch.float32).contiguous().detach()"]
    else:
        how |= {"frozen": frozen} if frozen else {}
        how |= {"transposed": True} if "weight_layout" in others else {}
        how |= {"jit": False} if not call["jit"] else {}
        how |= {"traced": traced} if traced else {}
        lines += [f"given = calls.arrays(made, {call['shape']}, {dtype!r}{_more(layout)})"]
    if family == "linear_log_probs":
        lines += [f"del given[{f'grad_{n}'!r}]" for n in ("entropy", "lse") if not call[n]]
    lines += [
        "numbers = calls.numbers(given)",
        f"oracle = reference.{op}(**numbers{_more(options)})",
    ]
    passed = _more({n: x for n, x in {**options, **others}.items() if n not in traced})
    if framework == "torch":
        autocast = f"    with torch.autocast({call['device']!r}, torch.bfloat16):\n    " if call.get("autocast") else ""
        arrays = "{n: x for n, x in given.items() if not n.startswith('grad_')}"
        lines += ["", "", "def call(**more):", f"    arrays = {arrays}"]
        lines += [f"{autocast}    return {op}(**arrays{passed}, **more)"]
        if "torch." in "".join(lines).replace("onchip.torch", ""):
            lines.insert(0, "import torch\n")
    else:
        lines += ["", "", "def call(**more):", f"    return {op}(**more{passed})"]
    extra: dict[str, Any] = {}
    if family == "fp8_linear" and call["device"] == "cuda" and call["backend"] not in ("dequantize", "xla"):
        extra["tensor_cores"] = True
    if call.get("precision") == "fp8":
        extra["fp8"] = True
    lines += [
        "",
        "",
        f"results = calls.results(call, given{_more(how)})",
        f"checks = compare(case, {dtype!r}, results, oracle, numbers, {options!r}{_more(extra)})",
        "assert_right(checks)",
    ]
    if framework == "jax":  # which has no device of an array's own
        platform = "gpu" if call["device"] == "cuda" else "cpu"
        lines.insert(0, f"import jax\n\njax.config.update('jax_default_device', jax.devices({platform!r})[0])\n")
    return "\n".join(lines) + "\n"


def run(call: Call) -> list[Check]:
    """Run its program; return the comparisons, or raise what it raises."""
    names: dict[str, Any] = {}
    exec(compile(program(call), "<the call>", "exec"), names)
    return names["checks"]  # type: ignore[no-any-return]


class _Code(str):
    """Shown as it is."""

    def __repr__(self) -> str:
        return str(self)


def _arguments(named: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in named.items())


def _more(named: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in named.items())


def _derived(call: Call) -> dict[str, Any]:
    """Options whose size follows from others'."""
    if call.get("softcap") is None:
        return {}
    return {"softcap": call["softcap"] * 4 * call["logit_std"] * call["logit_scale"]}


def _fields(call: Call) -> dict[str, Any]:
    """The fields of the op's case."""
    cases = import_module(f"onchip.ops.{call['op']}.cases")
    known = cases.Case.__dataclass_fields__
    tokens = math.prod(call["shape"])
    fields: dict[str, Any] = {"m": tokens, "snr_db": None} if "m" in known else {"tokens": tokens}
    if call.get("padded"):
        fields["padding"] = (8, 3)
    fields |= {name: value for name, value in call.items() if name in known}
    return {n: x for n, x in fields.items() if known[n].default != x}


def _frozen(call: Call) -> list[str]:
    """The names of the tensors that need no gradient."""
    parts = {"cross_entropy": ("logits",), "fp8_linear": ("x", "weight", "bias")}.get(
        call["op"], ("hidden", "weight", "bias")
    )
    frozen = {name for i, name in enumerate(parts) if call["frozen"] >> i & 1}
    if call.get("precision") == "fp8" and call["reduction"] == "none":
        frozen |= {"bias"}
    if call["op"] == "linear_jsd":
        teacher = () if call["teacher_grad"] else ("hidden", "weight", "bias", "logits")
        frozen = {f"student_{name}" for name in frozen} | {f"teacher_{name}" for name in teacher}
    return sorted(frozen)
