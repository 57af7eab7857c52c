"""Operators that are registered: what PyTorch is told of them."""

import subprocess
import sys

import pytest
import torch

from onchip.frontend import torch_library

SCHEMA = "test_added(Tensor(a!) total, Tensor? more, Tensor x, float by) -> Tensor"


def added(total, more, x, by):
    total.add_(x * by)
    return total.sum()


def registered(function=added):
    return torch_library.operator(SCHEMA, function, lambda total, more, x, by: total.new_empty(()), changed=[0, 1])


def test_what_is_changed_is_known_to_be():
    op, total, x = registered(), torch.zeros(3), torch.ones(3)
    assert op(total, None, x, 2.0) == 6
    assert total._version == 1
    op(total, x, x, 1.0)
    assert (total._version, x._version) == (2, 1)
    square = torch.ones(3, requires_grad=True) * total  # which keeps it
    op(total, None, x, 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


def test_opcheck():
    registered()
    torch.library.opcheck(torch.ops.onchip.test_added.default, (torch.zeros(3), None, torch.ones(3), 2.0))


def test_a_compiler_leaves_what_it_runs_alone():
    op, seen = registered(lambda *args: (seen.append(torch.compiler.is_compiling()), added(*args))[1]), []
    step = torch.compile(lambda total, x: op(total, None, x, 2.0) + 1, backend="aot_eager", fullgraph=True)
    total = torch.zeros(3)
    for expected in (7, 13):
        assert step(total, torch.ones(3)) == expected
    assert seen == [False, False]


def test_registered_again_it_replaces_the_first():
    registered()
    op = registered(lambda *args: added(*args) + 100)
    assert op(torch.zeros(3), None, torch.ones(3), 1.0) == 103


def test_the_package_may_be_imported_again():
    code = """
import importlib, sys
import onchip.torch
from onchip.ops.fp8_linear import torch_op
importlib.reload(torch_op)
for name in [x for x in sys.modules if x.startswith("onchip")]:
    del sys.modules[name]
importlib.import_module("onchip.torch")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_meta_tensors_are_the_fakes():
    meta = torch.empty(3, device="meta")
    assert registered()(meta, None, meta, 1.0).shape == ()
