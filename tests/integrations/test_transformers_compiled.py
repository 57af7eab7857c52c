"""Patched models under torch.compile: compiled once, and the same where the graph breaks."""

import pytest
import torch
import torch.nn.functional as F

from integrations.tiny import assert_close, batch, llama, step
from onchip.integrations.transformers import patch

STEPS = 3


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


def test_each_step_runs_what_the_first_one_compiled():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = llama()
    report = patch(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(STEPS):
        compiled(**batch()).loss.backward()
    assert len(graphs) == 1
    assert report.losses == 1  # what was compiled


def break_graph(module, given, made):
    torch._dynamo.graph_break()
    return made


def before_the_head():
    model = llama()
    model.model.norm.register_forward_hook(break_graph)
    return model


def between_head_and_loss():
    model = llama()

    def loss(logits, labels, vocab_size, **options):
        torch._dynamo.graph_break()
        return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))

    model.loss_function = loss
    return model


@pytest.mark.parametrize("make", [pytest.param(before_the_head, marks=pytest.mark.slow), between_head_and_loss])
def test_graphs_that_break(make):
    model = make()
    expected = step(model)
    report = patch(model)
    compiled = torch.compile(model, backend="eager")
    for _ in range(STEPS):
        assert_close(step(compiled), expected)
    assert report.losses > 0
    assert report.materialized == {}
