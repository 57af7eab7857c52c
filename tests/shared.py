"""What the tests of several ops share."""

import itertools
import json
import re
from importlib.resources import files

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from onchip import cli


def run_cli(*arguments, columns=200):
    """By default wide enough that no message is wrapped."""
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(cli.app, [str(a) for a in arguments])


def assert_fits_schema(command, document):
    """It is what the command's --json is said to be."""
    schema = json.loads(files("onchip").joinpath("schemas", f"{command}.json").read_text())
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(json.loads(json.dumps(document)))


def run_json(command, *arguments, exit_code=0):
    """The document that a command prints with --json, as its schema says it is."""
    result = run_cli(command, *arguments, "--json")
    assert result.exit_code == exit_code, result.output
    document = json.loads(result.stdout)
    assert_fits_schema(command, document)
    return document


def alternating(**values):
    """Each of the first argument's values, with the others' in turn: each of those is met, in few tests."""
    (name, first), *others = values.items()
    rows = [(value,) for value in first]
    together = 1
    for _, choices in others:
        step = together if len(choices) < len(first) else 1
        rows = [(*row, choices[number // step % len(choices)]) for number, row in enumerate(rows)]
        together *= len(choices) if len(choices) < len(first) else 1
    return pytest.mark.parametrize((name, *(other for other, _ in others)), rows, ids=str)


def pairs_once(names, rows, traits=lambda *row: row, ids=str):
    """Parametrises with the rows; slow are those without which each pair of `traits(*row)` is still met."""
    rows = list(rows)
    rows = [tuple(row) if "," in names else (row,) for row in rows]
    pairs = [set(itertools.combinations(enumerate(map(repr, traits(*row))), 2)) for row in rows]
    kept, left = set(), set().union(*pairs)
    while left:
        best = max(range(len(rows)), key=lambda number: len(pairs[number] & left))
        kept.add(best)
        left -= pairs[best]
    marks = [() if number in kept else pytest.mark.slow for number in range(len(rows))]
    return pytest.mark.parametrize(
        names, [pytest.param(*row, marks=mark) for row, mark in zip(rows, marks, strict=True)], ids=ids
    )


def assert_within_bounds(checks):
    """Every quantity is within its bounds of the oracle."""
    wrong = [c for c in checks if not c.ok]
    assert not wrong, wrong


def assert_refused(op, call, kind, message):
    """`call` raises a `kind` with `message` in it, in the op's name."""
    with pytest.raises(kind, match=re.escape(message)) as caught:
        call()
    assert str(caught.value).startswith(f"{op}: ")


def gradients(loss, *inputs, grad=None):
    import torch

    return torch.autograd.grad(loss, inputs, grad_outputs=grad)


# On a GPU.


def aside(run):
    """What `run` makes on another stream."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made = run()
    torch.cuda.current_stream().wait_stream(stream)
    return made


def capture(run):
    """A graph of it, and what a replay overwrites."""
    import torch

    aside(run)
    graph = torch.cuda.CUDAGraph()
    # What other libraries' threads do in this process has nothing to do with the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = run()
    return graph, captured


def without_synchronisation(step):
    """Run it where it raises if it synchronises."""
    import torch

    step()  # compiles what there is to compile
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
