"""Which labels each loss accepts, whole and sharded, and what computes them: the table in docs/internals/cells.md is
made here.

`PYTHONPATH=src:tests python tests/test_cells.py` writes it anew.
"""

import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import onchip.torch
from onchip.frontend.torch_register import Operator
from onchip.torch import TopK

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "cells.md"
T, H, V, K = 4, 16, 32, 3


class Reached(Exception):
    """The call passed its checks, and a backend was chosen."""


def labels():
    values = torch.full((T, K), 0.25)
    ids = torch.arange(K).repeat(T, 1)
    return {
        "one id": torch.zeros(T, dtype=torch.int64),
        "K ids": TopK(ids, values, "probs", "truncated"),
        "every entry": torch.full((T, V), 1 / V),
    }


def calls():
    """By loss and what it is of: the function with its arguments."""
    hidden, weight = torch.ones(T, H, dtype=torch.float16), torch.ones(V, H, dtype=torch.float16)
    logits = torch.ones(T, V, dtype=torch.float16)
    made = {}
    for name, target in labels().items():
        made["linear_cross_entropy", name] = (onchip.torch.linear_cross_entropy, (hidden, weight, target), {})
        made["cross_entropy", name] = (onchip.torch.cross_entropy, (logits, target), {})
    ids = torch.zeros(T, K, dtype=torch.int64)
    for name, of in {"one id": ids[:, 0], "K ids": ids}.items():
        made["linear_log_probs", name] = (onchip.torch.linear_log_probs, (hidden, weight, of), {})
        made["log_probs", name] = (onchip.torch.log_probs, (logits, of), {})
    topk = {"teacher_topk": labels()["K ids"]._replace(kind="log_probs", values=torch.full((T, K), -2.0))}
    made["linear_jsd", "a teacher's layer"] = (onchip.torch.linear_jsd, (hidden, weight, hidden, weight), {})
    made["jsd", "a teacher's logits"] = (onchip.torch.jsd, (logits, logits), {})
    made["linear_jsd", "a top-k teacher"] = (onchip.torch.linear_jsd, (hidden, weight), topk)
    made["jsd", "a top-k teacher"] = (onchip.torch.jsd, (logits,), topk)
    return made


COLUMNS = {"products": {"backend": "plain"}, "kernels": {"backend": "triton"}}
FP8 = {"FP8": {"backend": "plain", "precision": "fp8"}}


@contextmanager
def a_gpu_for_all():
    """No device refuses kernels, and no call gets further than its operator."""
    modules = [x for name, x in sys.modules.items() if name.startswith("onchip.")]
    with ExitStack() as stack:
        for name in ("device_refusal", "triton_refusal"):
            for module in modules:
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, return_value=None))
        stack.enter_context(mock.patch.object(Operator, "is_plain", side_effect=Reached))
        yield


def passes(function, args, options):
    """Whether there is a way to compute it."""
    try:
        function(*args, **options)
    except Reached:
        return True
    except ValueError:
        return False
    raise AssertionError(f"{function.__name__} returned without an operator")


def rows():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with a_gpu_for_all():
            for (loss, of), (function, args, more) in calls().items():
                columns = COLUMNS | (FP8 if loss == "linear_cross_entropy" else {})
                found = {
                    (name, where): passes(function, args, more | options | given)
                    for name, options in columns.items()
                    for where, given in {"whole": {}, "sharded": {"vocab_group": dist.group.WORLD}}.items()
                }
                yield loss, of, found
    finally:
        dist.destroy_process_group()


def table():
    """As the page has it."""
    lines = ["| loss | of | products | kernels | FP8 |", "| --- | --- | --- | --- | --- |"]
    for loss, of, found in rows():
        words = []
        for name in (*COLUMNS, *FP8):
            where = [x for x in ("whole", "sharded") if found.get((name, x))]
            words.append("whole and sharded" if len(where) == 2 else where[0] if where else "-")
        lines.append(f"| `{loss}` | {of} | {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def test_the_page_says_what_each_loss_computes():
    assert table() in PAGE.read_text()


if __name__ == "__main__":
    text = PAGE.read_text()
    first, last = text.index("| loss | of |"), text.rindex("|\n") + 2
    PAGE.write_text(text[:first] + table() + text[last:])
