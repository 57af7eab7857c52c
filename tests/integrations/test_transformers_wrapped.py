"""Patched models and what others do to models: copy, wrap, hook, compile and replace parts of them."""

import copy
import inspect
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from integrations.tiny import TINY, assert_close, assert_unchanged, batch, llama, step
from onchip.integrations.transformers import patch, unpatch
from onchip.torch import lm_loss

# -------------------------------------------------------------------------------- what the head does beside its product


def halved(module, args, out):
    return out / 2


def doubled(module, args):
    return (args[0] * 2,)


def gradient_doubled(module, grad_in, grad_out):
    return tuple(2 * g for g in grad_in)


def own_forward(head):
    head.forward = lambda hidden: nn.Linear.forward(head, hidden) / 2


def offloaded(model):
    from accelerate import cpu_offload

    cpu_offload(model, execution_device="cpu")


def dispatched(model):
    from accelerate import dispatch_model

    dispatch_model(model, {"": "cpu"}, force_hooks=True)


def wrapped(model):
    model.lm_head = nn.Sequential(model.lm_head)


def adapted():
    import peft

    return peft.get_peft_model(
        llama(), peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    ).train()


def of_adapter(part):
    return lambda m: getattr(m.get_base_model().lm_head, part).register_forward_hook(halved)


DOES_MORE = {
    "a forward hook": (llama, lambda m: m.lm_head.register_forward_hook(halved), "has a hook, halved of .*test"),
    "a pre-hook": (llama, lambda m: m.lm_head.register_forward_pre_hook(doubled), "has a hook, doubled of"),
    "a backward hook": (
        llama, lambda m: m.lm_head.register_full_backward_hook(gradient_doubled), "has a hook, gradient_dou"
    ),
    "a forward of its own": (llama, lambda m: own_forward(m.lm_head), "has a forward of its own, set by .*test"),
    "accelerate's offload": (llama, offloaded, "forward of its own.* set by accelerate.hooks"),
    "accelerate's device_map": (llama, dispatched, "forward of its own.* set by accelerate.hooks"),
    "a module around it": (llama, wrapped, "is a torch.nn.modules.container.Sequential"),
    "a hook inside of an adapter": (adapted, of_adapter("base_layer"), "has a layer inside that has a hook, halved"),
    "a hook of an adapter's own": (adapted, of_adapter("lora_B"), "has a layer inside that has a hook, halved"),
}  # fmt: skip


@pytest.mark.parametrize("name", DOES_MORE)
@pytest.mark.parametrize("before", [True, False])
def test_a_head_that_does_more(name, before):
    make, change, reason = DOES_MORE[name]
    model, other = make(), make()
    change(other)
    expected = step(other)
    if before:
        change(model)
        with pytest.warns(UserWarning, match=f"not patched: .*{reason}"):
            report = patch(model)
        assert_close(step(model), expected)
    else:
        report = patch(model)
        model(**batch())
        change(model)
        with pytest.warns(UserWarning, match=f"not fused any more: .*{reason}"):
            assert_close(step(model), expected)
        assert str(report).startswith("not fused: the head of LlamaForCausalLM ")
        assert str(report).endswith("; 1 loss so far")
    assert (report.fused, report.losses) == (False, not before)


def test_a_hook_that_comes_and_goes():
    model = llama()
    expected = step(model)
    report = patch(model)
    hook = model.lm_head.register_forward_hook(halved)
    with pytest.warns(UserWarning, match="not fused any more"):
        step(model)
    hook.remove()
    assert_close(step(model), expected)
    assert (report.fused, report.losses) == (True, 1)
    assert report.reason.startswith("lm_head [97, 32]")
    seen = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(out))
    try:
        with pytest.warns(UserWarning, match="global module hooks, such as FlopCounterMode"):
            assert_close(step(model), expected)
    finally:
        hook.remove()
    assert all(type(x) is torch.Tensor for x in seen if isinstance(x, torch.Tensor))
    assert_close(step(model), expected)
    assert report.losses == 2


def test_options_are_not_dropped_when_the_head_changes():
    model = llama()
    patch(model, z_loss=0.1)
    wrapped(model)
    with (
        pytest.warns(UserWarning, match="not fused any more"),
        pytest.raises(RuntimeError, match=r"z_loss can't be added to this loss: the head .* leave it out of patch"),
    ):
        model(**batch())
    other = llama()
    wrapped(other)
    with pytest.warns(UserWarning, match="not patched: .*; its loss has no z_loss"):
        patch(other, z_loss=0.1)


def test_a_head_under_a_plan_of_tensor_parallelism():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = llama()
        expected = step(model)
        mesh = init_device_mesh("cpu", (1,))
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=None)})
        with pytest.warns(UserWarning, match="is under a plan of tensor parallelism, such as ColwiseParallel"):
            patch(model)
        torch.testing.assert_close(model(**batch()).loss.detach(), expected[0])
    finally:
        dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------- copies and other homes


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": saved,
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_runs_its_own_weights(name):
    model = llama()
    report = patch(model)
    model(**batch())
    other = COPIES[name](model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    found = step(other)
    unpatch(other)
    assert type(other) is transformers.LlamaForCausalLM
    assert type(other.lm_head) is nn.Linear
    assert_close(found, step(other))
    assert report.losses == 1
    assert all(p.grad is None for p in model.parameters())


def replica_of(module):
    """What torch.nn.parallel.replicate makes, which needs GPUs: the same parameters, each in a module of its own."""
    made = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        setattr(made, name, replica_of(child))
    for name, p in module._parameters.items():
        if p is None:
            made._parameters[name] = None
        else:
            setattr(made, name, p * 1)
    return made


def test_replicas_of_data_parallel():
    model = llama()
    report = patch(model)
    replicas = [replica_of(model) for _ in range(2)]
    assert all(x.forward.__self__ is x for x in replicas)
    replicas[0].lm_head.weight = replicas[0].lm_head.weight * 0
    with ThreadPoolExecutor(2) as pool:  # as parallel_apply runs them
        outputs = list(pool.map(lambda x: x(**batch()), replicas))
    torch.testing.assert_close(outputs[0].loss, torch.tensor(97.0).log())
    torch.testing.assert_close(outputs[1].loss, model(**batch()).loss)
    assert report.losses == 3

    kind = type(outputs[0].logits)
    assert isinstance(kind(map(None, zip(*(x.logits for x in outputs), strict=True))), kind)  # as gather does it
    for x in (model, replicas[1]):
        x.eval()
    torch.testing.assert_close(replicas[1](**batch()).logits, model(**batch()).logits)


def test_other_threads_and_calls_inside_of_a_call_get_their_own_logits():
    model = llama()
    expected = model(input_ids=batch()["input_ids"]).logits
    seen = []

    def loss(logits, labels, vocab_size, **options):
        other = threading.Thread(target=lambda: seen.append(model(input_ids=labels.clamp(min=0)).logits))
        other.start()
        other.join()
        return transformers.loss.loss_utils.ForCausalLMLoss(logits, labels, vocab_size, **options)

    model.loss_function = loss
    report = patch(model)
    ids = batch()["input_ids"]
    model(input_ids=ids, labels=ids)
    assert type(seen[0]) is torch.Tensor
    torch.testing.assert_close(seen[0], expected)
    assert report.losses == 1


def test_what_a_patched_model_is_taken_for(tmp_path):
    model = llama()
    patch(model)
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert isinstance(model.lm_head, nn.Linear)
    assert str(type(model)) == str(transformers.LlamaForCausalLM)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM
    assert_close(step(loaded.train()), step(model))
    hidden = model.model(input_ids=batch()["input_ids"]).last_hidden_state
    torch.testing.assert_close(lm_loss(model.lm_head, hidden, batch()["labels"]), model(**batch()).loss)


# ----------------------------------------------------------------------------------------------------------- signatures


def mixtral():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**TINY, num_local_experts=2, num_experts_per_tok=1)
    return transformers.MixtralForCausalLM(config)


def test_each_patched_model_has_the_signature_of_its_class(tmp_path):
    models = [llama(), mixtral(), llama()]
    expected = [inspect.signature(m.forward) for m in models]
    own = [inspect.signature(type(m).forward) for m in models]
    for m in models:
        patch(m)
    patch(transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=2)))
    assert [inspect.signature(m.forward) for m in models] == expected
    assert [inspect.signature(type(m).forward) for m in models] == own
    assert [inspect.signature(type(m).__mro__[1].forward) for m in models] == own
    for m in models:
        args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
        trainer = transformers.Trainer(model=m, args=args)
        trainer._set_signature_columns_if_needed()
        assert trainer.model_accepts_loss_kwargs
        assert "position_ids" in trainer._signature_columns


# ---------------------------------------------------------------------------------------------------- wrapped by others


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="aot_eager")


def accelerator():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, mixed_precision="bf16")


def prepared(model):
    return accelerator().prepare(model)


def unwrapped(model):
    made = accelerator()
    return made.unwrap_model(made.prepare(model), keep_fp32_wrapper=False)


@pytest.fixture
def accelerate_state():
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("wrap", [pytest.param(compiled, marks=pytest.mark.slow), nn.DataParallel])
def test_wrapped_before_the_patch(wrap):
    assert_unchanged(wrap(llama()))


@pytest.mark.slow
def test_compiled_with_adapters_that_came_after_the_patch():
    import peft

    base = llama()
    report = patch(base)
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(base, config).train()
    found = step(compiled(model))
    assert str(report).startswith("not fused: its head was replaced; call patch again, before torch.compile's first")
    report = patch(model)
    assert_close(step(compiled(model)), found)
    assert report.losses == 1


@pytest.mark.parametrize("wrap", [prepared, unwrapped])
@pytest.mark.usefixtures("accelerate_state")
def test_prepared_by_accelerate(wrap):
    expected = step(wrap(llama()))
    model = llama()
    report = patch(model)
    found = step(wrap(model))
    assert report.losses == 1
    assert len(found) == len(expected)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0.02)
    other = prepared(llama())
    with pytest.warns(
        UserWarning, match="has a forward of its own: it was set by accelerate.*; patch the model before"
    ):
        patch(other)
    torch.testing.assert_close(step(other)[0], step(prepared(llama()))[0])


def test_a_class_that_other_libraries_make_of_a_patched_one():
    """As fully_shard does it."""
    model = llama()
    expected = step(model)
    report = patch(model)
    model.__class__ = type("ShardedLlama", (type(model),), {})
    assert_close(step(model), expected)
    assert report.losses == 1
    report = patch(model)
    assert_close(step(model), expected)
    assert report.losses == 1
    unpatch(model)
    assert_close(step(model), expected)
    assert report.losses == 1
