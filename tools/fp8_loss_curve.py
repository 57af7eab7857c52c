"""What FP8 layers do to a loss curve: trains the demo's model in float32, and with its linear layers in FP8.

Both see the same batches and start from the same weights.  "plain" and "onchip" are the same training in float32 with
two losses that differ by rounding: how far these two drift apart is the scale for FP8's difference.  On the CPU the
products are of float32 numbers that were rounded to FP8 as on a GPU (backend 'dequantize').

    python tools/fp8_loss_curve.py results/<date>-cpu-fp8-loss-curve.json docs/images/fp8-loss.svg
    python tools/fp8_loss_curve.py --plot results/<date>-cpu-fp8-loss-curve.json docs/images/fp8-loss.svg
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from onchip.bench import environment
from onchip.bench.figures import picture
from onchip.core import files
from onchip.demo import data, torch_train, train
from onchip.demo.model import ModelConfig

COLORS = {"onchip": "#0b5fd6", "fp8": "#c2772b", "plain": "#6b7280"}


def measure(steps: int, tokens: int, threads: int) -> dict[str, Any]:
    config = train.TrainConfig(steps=steps, tokens=tokens, seed=0, device="cpu", fp8=True)
    model = ModelConfig(vocab=8192)
    text = data.load_text()
    tokenizer = data.train_tokenizer(text, model.vocab)
    ids, held_out_ids = data.encode(tokenizer, text)
    described = {**environment.describe("cpu"), "threads": threads}
    with torch_train.use_device("cpu", threads):
        trainers = torch_train.make_trainers(model, config)
        losses, seconds = train.train_in_turn(trainers, config, ids, Console())
        held_out = {name: train.mean_loss(trainer, config, held_out_ids) for name, trainer in trainers.items()}
    return {
        "title": "Losses of the demo's model in float32 and with FP8 layers",
        "made_by": "tools/fp8_loss_curve.py",
        "environment": described,
        "settings": {**asdict(config), "model": {"implementation": torch_train.implementation(), **asdict(model)}},
        "corpus": {"name": "pydoc_data.topics", "train_tokens": len(ids), "held_out_tokens": len(held_out_ids)},
        "held_out_loss": held_out,
        "fp8": train.fp8_difference(losses, held_out, "onchip"),
        "train_seconds": seconds,
        "losses": losses,
    }


def draw(document: dict[str, Any]) -> bytes:
    losses = {name: np.array(values) for name, values in document["losses"].items()}
    steps = np.arange(1, len(losses["fp8"]) + 1)

    def fill(figure: Any) -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        above.plot(steps, losses["onchip"], color=COLORS["onchip"], linewidth=3, alpha=0.45, label="float32")
        above.plot(steps, losses["fp8"], color=COLORS["fp8"], linewidth=1, label="FP8 layers")
        above.set(title="Training loss", ylabel="nats per token")
        for name, label in (("plain", "float32 with another loss function"), ("fp8", "FP8 layers")):
            apart = losses[name] - losses["onchip"]
            below.plot(steps, apart, color=COLORS[name], linewidth=1, label=label)
        below.set(title="Difference from float32", xlabel="step", ylabel="nats per token")
        for axes in (above, below):
            axes.legend(frameon=False)

    return picture(fill, 6.4, 5.6, size=11, layout="constrained")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("numbers", type=Path, help="the JSON file to write or, with --plot, to read")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument("--plot", action="store_true", help="draw what is stored, and train nothing")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: 300)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per step, a multiple of 128 (default: 1024)")
    parser.add_argument("--threads", type=int, default=2, help="PyTorch's threads (default: 2)")
    given = parser.parse_args()
    if not given.plot:
        files.replace(given.numbers, json.dumps(measure(given.steps, given.tokens, given.threads), indent=1) + "\n")
    files.replace(given.picture, draw(json.loads(given.numbers.read_text())))


if __name__ == "__main__":
    main()
