"""`onchip demo`: corpus and tokenizer, options, a tiny run and what it writes."""

import functools
import html
import inspect
import io
import json
import math
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from rich.console import Console

from onchip.demo import (
    EXTRAS,
    PACKAGES,
    SEQUENCE,
    data,
    jax_train,
    run,
    torch_train,
    train,
)
from onchip.demo.model import ModelConfig, initial_weights
from shared import assert_fits_schema

GUIDES = Path(__file__).parents[1] / "docs" / "guides"
FRAMEWORKS = {"torch": torch_train, "jax": jax_train}
pytestmark = pytest.mark.usefixtures("one_thread")
TINY = {"steps": 4, "vocab": 300, "tokens": 2 * SEQUENCE, "device": "cpu", "seed": 3}


def quiet():
    return Console(file=io.StringIO(), width=120)


@pytest.fixture(scope="module")
def text():
    return load_text()


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request):
    return request.param


@pytest.fixture(scope="module")
def tiny_runs(tmp_path_factory):
    """A tiny run in a framework: its document, its folder, what it printed."""

    @functools.cache
    def tiny(framework):
        folder = tmp_path_factory.mktemp("demo")
        console = quiet()
        with pytest.MonkeyPatch.context() as patch:
            make_short(patch)
            document = run.run_demo(**TINY, framework=framework, out=folder / "new" / "out", console=console)
        return document, folder / "new" / "out", console.file.getvalue()

    return tiny


@pytest.fixture
def tiny_run(tiny_runs, framework):
    return tiny_runs(framework)


def load_text():
    """A part of the corpus: enough to train a tokenizer on."""
    return data.load_text()[:40_000]


def make_short(patch):
    text = load_text()
    patch.setattr(data, "load_text", lambda: text)
    patch.setattr(train, "SAMPLE_TOKENS", 20)
    patch.setattr(train, "MEASURE_REPEATS", 2)
    patch.setattr(train, "MEASURED_TOKENS", 128)
    patch.setattr(train, "MEASURED_VOCABS", (256, 512))


def trainer_of(framework, vocab):
    config = train.TrainConfig(steps=1, tokens=SEQUENCE, seed=0, device="cpu")
    return FRAMEWORKS[framework].make_trainers(ModelConfig(vocab=vocab), config)["onchip"]


# --------------------------------------------------------------------------------------------- corpus and tokenizer


def test_tokenizer_round_trip(text):
    tokenizer = data.train_tokenizer(text, 512)
    assert tokenizer.get_vocab_size() == 512
    for sample in (text[:5000], "unseen: \x00 \t ünïcödé 漢字 🙂\n"):
        assert tokenizer.decode(tokenizer.encode(sample).ids) == sample
    assert 256 <= data.train_tokenizer("to be or not to be", 1000).get_vocab_size() < 1000  # it may fall short


def test_the_text_is_prose():
    lines = data.load_text().splitlines()
    assert len(lines) > 500
    assert all(line.strip() == line and line.endswith((".", ":")) for line in lines)


def test_batches():
    ids = np.arange(1000)
    batch = data.random_batch(ids, 4 * SEQUENCE, np.random.default_rng(0))
    assert batch.shape == (4, SEQUENCE + 1)
    assert (np.diff(batch) == 1).all()
    parts = list(data.batches_in_order(ids, 2 * SEQUENCE))
    assert [len(part) for part in parts] == [2, 2, 2, 1]
    walked = np.concatenate([part[:, :-1].ravel() for part in parts])
    assert (walked == np.arange(7 * SEQUENCE)).all()
    assert (np.diff(np.concatenate(parts)) == 1).all()
    one = data.random_batch(np.arange(SEQUENCE + 1), SEQUENCE, np.random.default_rng(0))  # is enough
    assert (one == np.arange(SEQUENCE + 1)).all()


# --------------------------------------------------------------------------------------------- model and training


def test_every_implementation_is_the_same_causal_model():
    config = ModelConfig(vocab=300)
    weights = initial_weights(config, 1)
    ids = np.random.default_rng(0).integers(300, size=SEQUENCE + 1)
    changed = ids.copy()
    changed[60:] = 7
    of_transformers = torch_train.language_model(config, 1)
    hidden = jax_train.hidden_states(config, {name: jnp.asarray(x) for name, x in weights.items()}, jnp.asarray(ids))
    with torch.no_grad():
        before, after = (of_transformers(input_ids=torch.from_numpy(x)[None]).logits[0] for x in (ids, changed))
    np.testing.assert_allclose(hidden @ weights["lm_head.weight"].T, before, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(before[:60], after[:60], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before[60:], after[60:])


@pytest.mark.slow
def test_both_frameworks_take_the_same_steps(tiny_runs):
    """Two optimizers of the same name may differ in much."""
    of_torch, of_jax = (tiny_runs(name)[0] for name in FRAMEWORKS)
    for loss in ("plain", "onchip"):
        np.testing.assert_allclose(of_torch["losses"][loss], of_jax["losses"][loss], rtol=1e-4)
        np.testing.assert_allclose(of_torch["held_out_loss"][loss], of_jax["held_out_loss"][loss], rtol=1e-4)


def test_runs_start_alike_and_share_nothing():
    config = train.TrainConfig(steps=1, tokens=SEQUENCE, seed=5, device="cpu")
    plain, onchip = torch_train.make_trainers(ModelConfig(vocab=300), config).values()
    for a, b in zip(plain.model.parameters(), onchip.model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()


@pytest.mark.parametrize("steps", [1, 5, 150])
def test_learning_rate_stays_in_range(steps):
    config = train.TrainConfig(steps=steps, tokens=SEQUENCE, seed=0, device="cpu")
    rates = [train.learning_rate(step, config) for step in range(steps)]
    assert all(0 < rate <= config.learning_rate for rate in rates)


def test_the_learning_rate_does_not_compile_anew():
    traced = []

    def loss(hidden, weight, ids):
        traced.append(hidden)
        return jax_train.plain_loss(hidden, weight, ids)

    config = train.TrainConfig(steps=1, tokens=SEQUENCE, seed=0, device="cpu")
    trainer = jax_train.JaxTrainer(ModelConfig(vocab=300), loss, config)
    batch = data.random_batch(np.arange(300), SEQUENCE, np.random.default_rng(0))
    first, second = (trainer.step(batch, rate) for rate in (1e-3, 2e-3))
    assert first > second
    assert len(traced) == 1


def test_sample_draws_no_id_without_a_token(text):
    tokenizer = data.train_tokenizer(text, 256)
    trainer = trainer_of("torch", 4096)  # 3840 rows are as likely as the rest, were they drawn from
    options = {"prompt": "The", "tokens": 20, "temperature": 1.0}
    first, again, other = (train.sample_text(trainer, tokenizer, **options, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first.startswith("The")


# --------------------------------------------------------------------------------------------- the whole


def test_losses_agree(tiny_run):
    document, _, _ = tiny_run
    plain, onchip = document["losses"]["plain"], document["losses"]["onchip"]
    difference = document["difference"]
    assert len(plain) == len(onchip) == TINY["steps"]
    assert abs(plain[0] - math.log(TINY["vocab"])) < 1
    assert difference["largest_in_compared_steps"] == max(abs(a - b) for a, b in zip(plain, onchip, strict=True)) < 1e-3
    assert difference["within_bound"]


def test_document_has_the_measurements(tiny_run):
    document, _, _ = tiny_run
    assert [row["vocab"] for row in document["head_and_loss"]] == [256, 512]
    for row in document["head_and_loss"]:
        assert row["logits_bytes"] == 4 * 128 * row["vocab"]
        for cost in (row["plain"], row["onchip"]):
            assert 0 < cost["p10_ms"] <= cost["median_ms"] <= cost["p90_ms"]
            assert cost["extra_bytes"] >= 0
    assert document["settings"]["tokens"] == TINY["tokens"]
    assert document["settings"]["seed"] == TINY["seed"]
    library = {"torch": "transformers", "jax": "jax"}[document["settings"]["framework"]]
    assert f"{library} {metadata.version(library)}" in document["settings"]["model"]["implementation"]
    for package in PACKAGES[document["settings"]["framework"]]:
        assert metadata.version(package) == document["environment"][package]
    assert document["environment"]["tokenizers"]
    assert set(document["held_out_loss"]) == {"plain", "onchip"}
    assert document["sample"]["text"].startswith(document["sample"]["prompt"])
    assert "\n\n" not in document["sample"]["text"]


@pytest.mark.parametrize("framework", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_plain_stores_the_logits_and_onchip_does_not(framework, monkeypatch):
    """Of 32 MiB of logits."""
    monkeypatch.setattr(train, "MEASURE_REPEATS", 2)
    monkeypatch.setattr(train, "MEASURED_TOKENS", 256)
    config = train.TrainConfig(steps=1, tokens=SEQUENCE, seed=0, device="cpu")
    row = train.measure_head(framework, FRAMEWORKS[framework], 128, 32768, config, quiet())
    assert row["logits_bytes"] == 32 << 20
    assert row["plain"]["extra_bytes"] > 1.5 * row["logits_bytes"]
    assert row["onchip"]["extra_bytes"] < 0.6 * row["plain"]["extra_bytes"]


def test_files(tiny_run):
    document, out, printed = tiny_run
    assert {path.name for path in out.iterdir()} == {"demo.json", "demo.png", "demo.html"}
    assert json.loads((out / "demo.json").read_text(encoding="utf-8")) == json.loads(json.dumps(document))
    assert_fits_schema("demo", document)
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    for name in ("demo.json", "demo.png", "demo.html", "below the bound"):
        assert name in printed.replace("\n", " ")


def test_page_is_self_contained(tiny_run):
    page = (tiny_run[1] / "demo.html").read_text(encoding="utf-8")
    # Of resources alone: the sample is text that may well mention an address.  Links lead to the guides.
    references = re.findall(r"""(?:src|href|srcset|action|data)\s*=\s*["']([^"']*)""", page)
    assert references
    assert all(r.startswith("data:image/svg+xml;base64,") or r.endswith(".md") for r in references)
    assert not re.search(r"@import|url\(|<script|<link|<iframe", page)
    framework = tiny_run[0]["settings"]["framework"]
    assert f"onchip demo --framework {framework} --steps 4 --vocab 300 --tokens 256 --device cpu --seed 3" in page
    assert f"pip install 'onchip[{EXTRAS[framework]}]'" in page
    assert {"torch": "patch(model)", "jax": "shift=True"}[framework] in page
    stacks = re.findall(
        r"<h3>[^<]*</h3>\n<pre>([^<]*)</pre>\n<p>\n?(?:<a [^>]*>)?docs/guides/([^<]*)(?:</a>)?\n?</p>", page
    )
    assert len(stacks) == {"torch": 5, "jax": 3}[framework]
    for lines, name in stacks:
        # The guides run in tests of their own.
        guide = (GUIDES / name).read_text(encoding="utf-8").splitlines()
        for line in html.unescape(lines).splitlines():
            assert any(x.strip().startswith(line) for x in guide), line


@pytest.mark.slow
def test_fp8_beside_the_plain_training(tmp_path, monkeypatch):
    from onchip.demo import report
    from onchip.torch import Fp8Linear

    make_short(monkeypatch)
    console = quiet()
    document = run.run_demo(**TINY, framework="torch", out=tmp_path / "out", console=console, fp8=True)
    losses, fp8 = document["losses"], document["fp8"]
    assert list(losses) == ["plain", "onchip", "fp8"]
    assert fp8["baseline"] == "onchip"
    assert fp8["per_step"] == [a - b for a, b in zip(losses["fp8"], losses["onchip"], strict=True)]
    assert fp8["held_out"] == document["held_out_loss"]["fp8"] - document["held_out_loss"]["onchip"]
    # Not equal, or nothing was converted; near, since quantising costs little.
    assert 0 < fp8["largest"] < 0.05
    verdict = report._fp8_verdict(fp8)
    page = (tmp_path / "out" / "demo.html").read_text(encoding="utf-8")
    assert verdict in page.replace("&#43;", "+")
    assert "--seed 3 --fp8" in page
    assert "With the linear layers in FP8" in console.file.getvalue()
    config = train.TrainConfig(steps=1, tokens=SEQUENCE, seed=0, device="cpu", fp8=True)
    trainers = torch_train.make_trainers(ModelConfig(vocab=256), config)
    converted = [m for m in trainers["fp8"].model.modules() if isinstance(m, torch.nn.Linear)]
    assert len(converted) == 15  # seven in each layer, and the head
    assert [isinstance(m, Fp8Linear) and m.backend == "dequantize" for m in converted] == [True] * 14 + [False]
    for a, b in zip(trainers["fp8"].model.parameters(), trainers["onchip"].model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_fp8_on_a_gpu_is_compared_with_bf16(tmp_path):
    document = run.run_demo(
        **{**TINY, "steps": 30, "device": "cuda"}, framework="torch", out=tmp_path / "out", console=quiet(), fp8=True
    )
    assert list(document["losses"]) == ["plain", "onchip", "fp8", "bf16"]
    assert document["fp8"]["baseline"] == "bf16"
    assert 0 < document["fp8"]["largest"] < 0.1


@pytest.fixture
def no_drawings(monkeypatch):
    """On the page, whose text is looked at: they take most of its time."""
    monkeypatch.setattr("onchip.demo.report._drawing", lambda draw, document: "")


def test_page_escapes_the_sample(tiny_run, no_drawings):
    from onchip.demo import report

    document = {**tiny_run[0], "sample": {**tiny_run[0]["sample"], "text": "<script>alert(1)</script>"}}
    assert "<script>" not in report.html_page(document)


def test_page_links_to_the_guides_of_a_checkout(tiny_run, no_drawings, tmp_path):
    from onchip.demo import report

    links = re.findall('href="([^"]+)"', report.html_page(tiny_run[0], tmp_path))
    assert len(links) >= 3
    assert all((tmp_path / link).is_file() for link in links)
    assert 'href="' not in report.html_page(tiny_run[0])  # of an installed package


@pytest.mark.slow
def test_same_seed_same_run(tiny_runs, tmp_path, monkeypatch):
    make_short(monkeypatch)
    document = tiny_runs("torch")[0]
    again = run.run_demo(**TINY, framework="torch", out=tmp_path / "out", console=quiet())
    assert again["sample"] == document["sample"]
    assert again["losses"] == document["losses"]


@pytest.mark.parametrize(("busy", "threads"), [(0.1, 4), (1.2, 3), (9.0, 1)])
def test_busy_cores_are_left_alone(busy, threads, tmp_path, monkeypatch):
    from onchip.bench import environment

    seen = []

    def stop(*_, **__):
        seen.append(torch.get_num_threads())
        raise InterruptedError

    described = {"cores": 4, "busy_cores": busy, "threads": 4}
    monkeypatch.setattr(environment, "describe", lambda *_: dict(described))
    monkeypatch.setattr(train, "train_and_measure", stop)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with pytest.raises(InterruptedError):
            run.run_demo(**TINY, out=tmp_path / "out", console=quiet())
        assert seen == [threads]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("steps", 0, "--steps must be 1 or more; got 0"),
        ("vocab", 255, "--vocab must be from 256"),
        ("vocab", 10**9, "--vocab must be from 256"),
        ("tokens", 1, "--tokens must be a multiple of 128.*got 1, try 128"),
        ("tokens", -5, "--tokens must be a multiple of 128.*try 128"),
        ("tokens", 127, "--tokens must be a multiple of 128.*try 128"),
        ("tokens", 130, "--tokens must be a multiple of 128.*try 256"),
        ("seed", -1, "--seed must be from 0"),
        ("seed", 2**63, "--seed must be from 0"),
        ("device", "tpu", "--device must be auto, cpu or cuda; got 'tpu'"),
        ("framework", "mxnet", "--framework must be torch or jax; got 'mxnet'"),
        ("fp8", True, "--fp8 converts the layers of a PyTorch model; --framework is jax"),
    ],
)
def test_wrong_options_raise_before_any_work(option, value, message, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=message):
        run.run_demo(**{**TINY, "framework": "jax", option: value}, out=out, console=quiet())
    assert not out.exists()


@pytest.mark.parametrize(
    ("framework", "other"), [("jax", "torch"), pytest.param("torch", "jax", marks=pytest.mark.slow)]
)
def test_one_framework_does_not_load_the_other(framework, other):
    code = f"import sys, onchip.demo.run, onchip.demo.{framework}_train; assert {other!r} not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "package", ["torch", "transformers", "jax", "optax", "tokenizers", "matplotlib", "jinja2", "psutil"]
)
def test_missing_package(package, tmp_path, monkeypatch):
    monkeypatch.setattr("onchip.core.machine.find_spec", lambda name: None if name == package else name)
    framework = "jax" if package in PACKAGES["jax"] else "torch"
    with pytest.raises(ImportError, match=rf"needs {package}.*pip install 'onchip\[{EXTRAS[framework]}\]'"):
        run.run_demo(**TINY, framework=framework, out=tmp_path / "out", console=quiet())


def test_defaults_are_valid():
    parameters = inspect.signature(run.run_demo).parameters
    run._check_sizes(**{name: parameters[name].default for name in ("steps", "vocab", "tokens", "seed")})
