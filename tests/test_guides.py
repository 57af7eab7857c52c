"""The training scripts of docs/guides: train.py has the same losses in one process and, with FSDP2, in two; finetune.py
has those of the unpatched model.  JAX's page of data parallelism runs on four devices.
"""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

GUIDES = Path(__file__).parents[1] / "docs" / "guides"
SCRIPT = GUIDES / "train.py"


@pytest.mark.slow
def test_two_processes_take_the_same_steps_as_one():
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # Not its exit status: gloo's threads abort now and then where a process ends.
    said = subprocess.run([*torchrun, SCRIPT, "fsdp"], capture_output=True, text=True, env=environment)
    script = runpy.run_path(str(SCRIPT))
    torch.manual_seed(0)
    losses = script["train"](script["Model"]())
    assert losses[-1] < 0.7 * losses[0]
    assert said.stdout.split(), said.stderr
    torch.testing.assert_close([float(x) for x in said.stdout.split()], losses, rtol=0, atol=2e-4)


def test_a_model_is_fine_tuned_from_a_folder_to_a_folder(tmp_path, monkeypatch, capsys):
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(topics[name] for name in ("assignment", "class", "function")))
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train([str(text)], trainers.WordLevelTrainer(vocab_size=400, special_tokens=["<unk>", "<eos>"]))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=words.get_vocab_size(), **sizes)).save_pretrained(tmp_path / "model")

    script = runpy.run_path(str(GUIDES / "finetune.py"))
    given = str(tmp_path / "model"), str(text), str(tmp_path / "tuned"), 10
    losses = script["main"](*given)
    assert "20 losses so far" in capsys.readouterr().out
    assert losses[-1] < losses[0]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").config.vocab_size == words.get_vocab_size()
    monkeypatch.setitem(script["main"].__globals__, "patch", lambda model: "not patched")
    assert losses == pytest.approx(script["main"](*given), rel=1e-4)


def test_the_page_of_data_parallelism_runs_on_four_devices():
    page = (GUIDES / "data_parallel_jax.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    code = "\n".join([*blocks, "assert jax.device_count() == 4"])
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment = (
        os.environ
        | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
