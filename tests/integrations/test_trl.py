"""TRL's trainers, with and without onchip, from the same seed on the same data."""

import copy
import math
import re
import sys
from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import distillation_trainer, dpo_trainer, utils

from onchip.integrations import trl as integration
from onchip.integrations.transformers import patch
from onchip.integrations.trl import DivergenceCall, LogProbCall

WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
STEPS = 3
DIVERGENCE_LOSS = distillation_trainer._chunked_divergence_loss  # TRL's own


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def llama(seed, hidden=16):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=hidden,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def rows(**columns):
    return Dataset.from_dict({name: values * 6 for name, values in columns.items()})


PROMPTS = {"prompt": ["a b c", "d e"]}
PAIRS = {**PROMPTS, "chosen": [" f g h i", " j k"], "rejected": [" l m", " n o p"]}


def reward(completion_ids, **more):
    """Differs between the completions of a prompt."""
    return [sum(ids) / (29 * len(ids)) for ids in completion_ids]


# The trainer, its config, its data, what else it takes.
GENERATED = {"max_completion_length": 5, "temperature": 0.9}
TEXT = {"text": ["a b c d e f", "g h i"]}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
TRAINERS = {
    "sft": (SFTTrainer, SFTConfig, TEXT, {}, {}),
    "sft-lora": (SFTTrainer, SFTConfig, TEXT, {}, {"peft_config": LORA}),
    "dpo": (DPOTrainer, DPOConfig, PAIRS, {"use_weighting": True, "beta": 1.0}, {}),
    "kto": (
        KTOTrainer,
        KTOConfig,
        {**PROMPTS, "completion": [" f g h i", " j k"], "label": [True, False]},
        {},
        {},
    ),
    "grpo": (
        GRPOTrainer,
        GRPOConfig,
        PROMPTS,
        {**GENERATED, "num_generations": 2, "beta": 0.1},
        {"reward_funcs": reward},
    ),
    "rloo": (RLOOTrainer, RLOOConfig, PROMPTS, {**GENERATED, "num_generations": 2}, {"reward_funcs": reward}),
    "distillation": (
        DistillationTrainer,
        DistillationConfig,
        PROMPTS,
        {**GENERATED, "beta": 0.3},
        {"teacher_model": 8},
    ),
}


def train(name, tokenizer, folder, change=None):
    """The logs of a few steps, and the weights after them; `change` is done to the model before."""
    trainer_class, config_class, data, options, more = TRAINERS[name]
    config = config_class(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.5,
        optim="sgd",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        seed=0,
        **options,
    )
    llama(seed=0).save_pretrained(folder / "model")  # a path, of which trainers make their reference model too
    more = {key: llama(1, hidden=value) if key == "teacher_model" else value for key, value in more.items()}
    model = str(folder / "model")
    if change is not None:
        model = LlamaForCausalLM.from_pretrained(model)
        change(model)
    set_seed(0)
    trainer = trainer_class(
        model=model,
        args=config,
        train_dataset=rows(**data),
        processing_class=copy.deepcopy(tokenizer),
        **more,
    )
    trainer.train()
    return trainer.state.log_history, {key: x.detach() for key, x in trainer.model.named_parameters()}


@pytest.fixture
def calls(monkeypatch):
    """The names of onchip's ops that were called."""
    made = []
    for name in ("linear_log_probs", "linear_jsd"):
        op = getattr(integration, name)
        monkeypatch.setattr(
            integration, name, lambda *args, op=op, **more: made.append(op.__name__) or op(*args, **more)
        )
    return made


@pytest.fixture
def installed():
    yield integration.install()
    integration.uninstall()


def assert_near(ours, theirs, bound=1e-5):
    """By the relative norm; both may be None."""
    assert (ours is None) == (theirs is None)
    if theirs is not None:
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert (ours.double() - theirs.double()).norm() <= bound * max(float(theirs.double().norm()), 1e-30)


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.slow] * (x in ("rloo", "kto", "sft-lora"))) for x in TRAINERS],
)
def test_trainer_learns_the_same(name, tokenizer, tmp_path, calls, request):
    logs, weights = train(name, tokenizer, tmp_path)
    assert calls == []
    request.getfixturevalue("installed")
    our_logs, our_weights = train(name, tokenizer, tmp_path)

    assert set(calls) == ({"linear_jsd", "linear_log_probs"} if name == "distillation" else {"linear_log_probs"})
    assert len(logs) == len(our_logs) == STEPS + 1
    for step, (theirs, ours) in enumerate(zip(logs, our_logs, strict=True)):
        assert theirs.keys() == ours.keys()
        for key, value in theirs.items():
            if not any(part in key for part in ("time", "per_second", "flos")):
                difference = key == "kl" or key.startswith("rewards/")  # of sums of log-probabilities, about 80 here
                near = math.isclose(value, ours[key], rel_tol=1e-5, abs_tol=1e-5 if difference else 1e-6)
                assert near, (step, key, value, ours[key])
    assert max(entry.get("grad_norm", 0) for entry in logs) > 0.05
    for key, theirs in weights.items():
        assert_near(our_weights[key], theirs)


@pytest.mark.parametrize("name", ["sft", pytest.param("sft-lora", marks=pytest.mark.slow)])
def test_a_trainer_says_that_it_does_without_the_patch_of_its_model(name, tokenizer, tmp_path):
    reports = []
    logs, weights = train(name, tokenizer, tmp_path, change=lambda model: None)
    with pytest.warns(UserWarning, match=r"not fused any more: .* call onchip\.integrations\.trl\.install\(\)"):
        our_logs, our_weights = train(name, tokenizer, tmp_path, change=lambda model: reports.append(patch(model)))
    assert "a trainer of TRL computes the loss itself" in str(reports[0])
    assert (reports[0].fused, reports[0].losses) == (False, 0)
    assert [x.get("loss") for x in our_logs] == [x.get("loss") for x in logs]
    for key, theirs in weights.items():
        assert torch.equal(our_weights[key], theirs)


# ------------------------------------------------------------------------------------------------------- each function

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def head(*, hidden=torch.float32, weight=torch.float32, bias=False, tokens=7):
    """Hidden states, a weight and a bias that need gradients.  Two rows of the weight are the same."""
    made = torch.randn(tokens, 8), torch.randn(11, 8), torch.randn(11) if bias else None
    made[1][4] = made[1][2]
    made[0][:2] = 2 * made[1][2]  # of which those are the top
    dtypes = hidden, weight, weight
    return [None if x is None else x.to(dtype).requires_grad_() for x, dtype in zip(made, dtypes, strict=True)]


def with_gradients(function, tensors, upstream):
    """What the function returns of copies of the tensors, and the gradients of the sum of upstream * result."""
    tensors = [None if x is None else x.detach().clone().requires_grad_(x.requires_grad) for x in tensors]
    results = function(*tensors)
    sum((x * g).sum() for x, g in zip(results, upstream, strict=False) if x is not None).backward()
    return [None if x is None else x.detach() for x in results], [None if x is None else x.grad for x in tensors]


@pytest.mark.parametrize(
    ("dtypes", "more", "outputs", "bound"),
    [
        ({}, {}, OUTPUTS, 1e-5),
        ({"bias": True}, {"temperature": 0.7, "final_logit_softcapping": 5.0, "logit_scale": 0.3}, OUTPUTS, 1e-5),
        ({"bias": True, "tokens": 0}, {}, OUTPUTS, 1e-5),
        ({}, {}, ("log_probs", "entropy"), 1e-5),
        ({}, {"temperature": 1.3}, ("log_probs",), 1e-5),
        ({"weight": torch.bfloat16, "bias": True}, {}, OUTPUTS, 1e-5),
        # TRL rounds logits and their gradients to 16 bits.
        ({"hidden": torch.bfloat16, "bias": True}, {}, ("entropy", "mean_logits"), 2e-2),
        ({"hidden": torch.bfloat16, "weight": torch.bfloat16}, {}, ("entropy",), 2e-2),
    ],
)
def test_log_probs_are_those_of_trl(installed, dtypes, more, outputs, bound):
    tensors = head(**dtypes)
    tokens = len(tensors[0])
    arguments = {"targets": torch.tensor([2, 4, 0, 10, 3, 3, 5])[:tokens], "temperature": 1.0, **more}
    upstream = torch.randn(2, tokens)

    def run(function):
        def of(*tensors):
            return function.apply(*LogProbCall(*tensors, chunk_size=32, outputs=outputs, **arguments))

        return with_gradients(of, tensors, upstream)

    theirs, their_grads = run(ChunkedLogProbFunction)
    ours, our_grads = run(utils._ChunkedLogProbFunction)
    assert_near(ours.pop(), theirs.pop(), 0)  # is_top1
    for x, y in zip(ours + our_grads, theirs + their_grads, strict=True):
        assert_near(x, y, bound)


def test_of_logits_that_tie_the_first_is_top1(installed):
    hidden, weight, _ = head()
    call = LogProbCall(hidden[:2], weight, None, torch.tensor([2, 4]), 1.0, 32)
    for function in (ChunkedLogProbFunction, utils._ChunkedLogProbFunction):
        assert function.apply(*call)[4].tolist() == [True, False]


def divergence_call(*, student=None, teacher=None, **more):
    """A batch of 2 x 3 tokens, 2 of which don't count; the student's tensors need gradients."""
    student, teacher = head(tokens=6, **(student or {})), head(tokens=6, **(teacher or {}))
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    names = "hidden_states", "lm_head_weight", "lm_head_bias"
    tensors = {f"student_{name}": x for name, x in zip(names, student, strict=True)}
    tensors |= {f"teacher_{name}": None if x is None else x.detach() for name, x in zip(names, teacher, strict=True)}
    for name in ("student_hidden_states", "teacher_hidden_states"):
        tensors[name] = tensors[name].detach().reshape(2, 3, 8)
    tensors["student_hidden_states"].requires_grad_()
    return DivergenceCall(**{"completion_mask": mask, "beta": 0.3, **tensors, **more})


def divergence(function, call):
    """(loss, entropies, number) and the gradients of the student's tensors."""
    names = "student_hidden_states", "student_lm_head_weight", "student_lm_head_bias"

    def of(*tensors):
        return function(**{**call._asdict(), **dict(zip(names, tensors, strict=True))})

    return with_gradients(of, [getattr(call, name) for name in names], [torch.tensor(1.7)])


IN_16_BITS = {"hidden": torch.bfloat16, "weight": torch.bfloat16}


@pytest.mark.parametrize(
    ("more", "bound"),
    [
        ({"beta": 0.0}, 1e-5),
        ({"beta": 1.0, "num_items_in_batch": torch.tensor(9)}, 1e-5),
        ({"student": {"bias": True}, "teacher": {"bias": True}, "num_items_in_batch": 5}, 1e-5),
        ({"student_logit_scale": 0.4, "teacher_logit_scale": 0.4, "temperature": 1.3}, 1e-5),
        ({"completion_mask": torch.zeros(2, 3)}, 1e-5),
        ({"teacher": IN_16_BITS}, 2e-2),  # under autocast
    ],
)
def test_divergence_is_that_of_trl(installed, more, bound):
    call = divergence_call(**more)
    with torch.autocast("cpu", torch.bfloat16, enabled=bound > 1e-5):
        theirs, their_grads = divergence(DIVERGENCE_LOSS, call)
        ours, our_grads = divergence(distillation_trainer._chunked_divergence_loss, call)
    for x, y in zip(ours + our_grads, theirs + their_grads, strict=True):
        assert_near(x, y, bound)


def test_divergence_of_sharded_heads(installed):
    """FSDP2's, gathered as TRL gathers them."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        call = divergence_call(student={"bias": True})
        heads = "student_lm_head_weight", "student_lm_head_bias", "teacher_lm_head_weight"
        sharded = {name: distribute_tensor(getattr(call, name).detach(), mesh, [Shard(0)]) for name in heads}
        sharded = call._replace(**{name: x.requires_grad_() for name, x in sharded.items()})
        plain, plain_grads = divergence(distillation_trainer._chunked_divergence_loss, call)
        ours, our_grads = divergence(distillation_trainer._chunked_divergence_loss, sharded)
        our_grads = [x.full_tensor() if isinstance(x, DTensor) else x for x in our_grads]
    finally:
        torch.distributed.destroy_process_group()
    for x, y in zip(ours + our_grads, plain + plain_grads, strict=True):
        assert_near(x, y)


# -------------------------------------------------------------------------------------------- what onchip can't compute


def partitioned(weight):
    """With the mark that DeepSpeed ZeRO-3 leaves on a parameter."""
    weight.ds_id = 0
    return weight


def log_prob_call(*, zero3=False, hidden=torch.float32, **more):
    hidden, weight, bias = head(hidden=hidden)
    weight = partitioned(weight) if zero3 else weight
    return LogProbCall(hidden, weight, bias, torch.zeros(7, dtype=torch.int64), 1.0, 32, **more)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"zero3": True}, "ZeRO-3 partitions lm_head"),
        ({"hidden": torch.float64}, "hidden states are float64"),
        ({"logit_scale": 0.0}, "logit scale is 0.0"),
        ({"final_logit_softcapping": 0.0}, "softcap is 0.0"),
    ],
)
def test_trl_computes_log_probs_that_onchip_cannot(installed, calls, more, reason):
    call = log_prob_call(**more)
    with pytest.warns(UserWarning, match=f"TRL's own _ChunkedLogProbFunction runs, because .*{reason}"):
        ours = utils._ChunkedLogProbFunction.apply(*call)
    utils._ChunkedLogProbFunction.apply(*call)  # and warns no more, which would be an error
    assert calls == []
    for x, y in zip(ours, ChunkedLogProbFunction.apply(*call), strict=True):
        assert torch.equal(x, y)


def test_other_devices_are_left_to_trl(installed):
    call = LogProbCall(
        *(None if x is None else torch.empty_like(x, device="meta") for x in log_prob_call()[:4]), 1.0, 32
    )
    with pytest.warns(UserWarning, match="hidden states are on meta"), pytest.raises(RuntimeError, match="autocast"):
        utils._ChunkedLogProbFunction.apply(*call)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (
            {"student": {"weight": torch.bfloat16}},
            "the student's lm_head is bfloat16 and its hidden states are float32",
        ),
        (
            {"teacher": {"hidden": torch.bfloat16}},
            "the teacher's lm_head is float32 and its hidden states are bfloat16",
        ),
        ({"teacher": {"hidden": torch.float64}}, "the teacher's hidden states are float64"),
        ({"student_final_logit_softcapping": 3.0}, "linear_jsd has no softcap"),
        ({"teacher_logit_scale": 0.5}, "student's logits are scaled by 1.0 and the teacher's by 0.5"),
        ({"student_logit_scale": -1.0, "teacher_logit_scale": -1.0}, "logit scale is -1.0"),
    ],
)
def test_trl_computes_divergences_that_onchip_cannot(installed, calls, more, reason):
    call = divergence_call(**more)
    with pytest.warns(UserWarning, match=f"TRL's own _chunked_divergence_loss runs, because .*{reason}"):
        ours = distillation_trainer._chunked_divergence_loss(*call)
    distillation_trainer._chunked_divergence_loss(*call)
    assert calls == []
    for x, y in zip(ours, DIVERGENCE_LOSS(*call), strict=True):
        assert torch.equal(x, y)


# ------------------------------------------------------------------------------------------------ install and uninstall


def test_install_replaces_and_uninstall_restores(monkeypatch):
    theirs = utils._ChunkedLogProbFunction, distillation_trainer._chunked_divergence_loss
    monkeypatch.setattr(dpo_trainer, "_chunked_divergence_loss", theirs[1], raising=False)  # imported there by name
    report = integration.install()
    assert report == integration.install()
    assert report.replaced == (
        "trl.trainer.utils._ChunkedLogProbFunction",
        "trl.trainer.distillation_trainer._chunked_divergence_loss",
        "trl.trainer.dpo_trainer._chunked_divergence_loss",
    )
    assert str(report) == SHOWN
    assert dpo_trainer._chunked_divergence_loss is distillation_trainer._chunked_divergence_loss is not theirs[1]
    for _ in range(2):
        integration.uninstall()
        assert (utils._ChunkedLogProbFunction, distillation_trainer._chunked_divergence_loss) == theirs
        assert dpo_trainer._chunked_divergence_loss is theirs[1]


SHOWN = f"""TRL {trl.__version__} runs through onchip, which replaced
  trl.trainer.utils._ChunkedLogProbFunction
  trl.trainer.distillation_trainer._chunked_divergence_loss
  trl.trainer.dpo_trainer._chunked_divergence_loss
for
  trl.SFTTrainer
  trl.DPOTrainer
  trl.KTOTrainer
  trl.GRPOTrainer
  trl.RLOOTrainer
  trl.experimental.async_grpo.AsyncGRPOTrainer
  trl.experimental.bema_for_ref_model.DPOTrainer
  trl.experimental.gmpo.GMPOTrainer
  trl.DistillationTrainer"""


def test_reported_trainers_are_those_that_ask_for_it():
    """All whose sources do; the report has subclasses of these too, which inherit it."""
    asking = set()
    for path in Path(trl.__file__).parent.rglob("*_trainer.py"):
        source = path.read_text()
        if "fused_lm_head=True" in source or "= _chunked_divergence_loss(" in source:
            asking |= set(re.findall(r"^class (\w+Trainer)\(", source, re.MULTILINE))
    named = {name.rpartition(".")[2] for names in integration.TRAINERS.values() for name in names}
    assert named == asking | {"GMPOTrainer"}


def test_another_version_with_the_same_functions_will_do(monkeypatch):
    monkeypatch.setattr(trl, "__version__", "1.17.0.dev0")
    assert str(integration.install()).startswith("TRL 1.17.0.dev0 runs through onchip")
    integration.uninstall()


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        ("trl.trainer.distillation_trainer", RuntimeError, "has no trl.*; pip install 'trl==1.16"),
        ("trl", ModuleNotFoundError, "TRL isn't installed; pip install 'onchip"),
    ],
)
def test_a_trl_that_is_missing_or_old(monkeypatch, module, error, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(error, match=f"onchip.integrations.trl: .*{message}"):
        integration.install()
    assert utils._ChunkedLogProbFunction is ChunkedLogProbFunction
