"""The simulation on docs/guides/parallelism.md: which part of a training step the loss takes, from 8 to 1,024 GPUs.

    python tools/parallelism.py docs/guides/parallelism.md docs/images/parallelism.svg

rewrites the table between the page's two markers, and the picture.  The model of a step is written on the page.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

from onchip.bench.figures import picture
from onchip.plan import plan
from onchip.plan.gpus import product_ms
from onchip.plan.links import exchange
from onchip.plan.words import memory_text

GPU, TOKENS, SEQUENCE, BATCH = "h100", 8192, 8192, 4 << 20
LINK, NETWORK = 360.0, 40.0  # GB/s a GPU, within a host (80% of the NVLink's data sheet) and between hosts
HOSTS_OF = 8
BODY_RATE = 0.8  # of the rate of large products, for a body's own products


class Body(NamedTuple):
    """A Llama's blocks."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    key_value: float  # of the heads

    @property
    def parameters(self) -> int:
        attention = (2 + 2 * self.key_value) * self.hidden**2
        return int(self.layers * (attention + 3 * self.hidden * self.intermediate))


MODELS = (
    Body("llama-3.1-8b", 32, 4096, 14336, 1 / 4),
    Body("llama-3.1-70b", 80, 8192, 28672, 1 / 8),
    Body("llama-3.1-405b", 126, 16384, 53248, 1 / 16),
)
VOCAB = 128256


class Step(NamedTuple):
    """Milliseconds of a micro-batch of one tensor-parallel group."""

    body: float
    body_exchanges: float
    loss: float
    loss_exchanges: float
    eager: float
    """The loss in eager PyTorch, with the same exchanges."""
    loss_bytes: int
    eager_bytes: int


def step(model: Body, ranks: int) -> Step:
    """One rank's part."""
    products = 3 * model.parameters * TOKENS // ranks
    attention = 3 * model.layers * model.hidden * SEQUENCE * TOKENS // ranks  # causal: half of the square, twice
    hidden = exchange("hidden", "all-gather", 2 * TOKENS * model.hidden, ranks, LINK).ms if ranks > 1 else 0.0
    assert hidden is not None
    of_loss = plan(
        tokens=TOKENS,
        model=model.name,
        gpu=GPU,
        tensor_parallel=ranks,
        sequence_parallel=ranks > 1,
        link=LINK if ranks > 1 else None,
    )
    row = of_loss.row("default")
    assert row.ms is not None
    assert row.memory_bytes is not None
    assert of_loss.baseline.ms is not None
    assert of_loss.baseline.memory_bytes is not None
    return Step(
        body=product_ms(products + attention) / BODY_RATE,
        # Two all-gathers and two reduce-scatters a layer in each direction, and two all-gathers again in backward.
        body_exchanges=10 * model.layers * hidden,
        loss=row.ms,
        loss_exchanges=sum(x.exposed_ms or 0.0 for x in of_loss.exchanges),
        eager=of_loss.baseline.ms,
        loss_bytes=row.memory_bytes,
        eager_bytes=of_loss.baseline.memory_bytes,
    )


def share(model: Body, ranks: int, gpus: int, *, fused: bool) -> float | None:
    """The loss's part of a step with its exchanges; None if the batch is too small for so many GPUs."""
    replicas = gpus // ranks
    if replicas < 1 or replicas * TOKENS > BATCH:
        return None
    s = step(model, ranks)
    loss = (s.loss if fused else s.eager) + s.loss_exchanges
    computed = s.body + s.body_exchanges + loss
    # FSDP gathers the parameters twice and reduces their gradients, under the computation of each micro-batch.
    parameters = 2 * (model.parameters + 2 * VOCAB * model.hidden) // ranks
    rate = LINK if gpus <= HOSTS_OF else NETWORK
    sharded = 3e-6 * parameters * (replicas - 1) / replicas / rate
    return loss / max(computed, sharded)


def table() -> str:
    """A line for each model and number of ranks."""
    lines = [
        "| model | TP | the blocks | their exchanges | the loss | its exchanges | its share of the step "
        "| in eager PyTorch | memory of the loss | in eager PyTorch |",
        "|---" * 10 + "|",
    ]
    for model in MODELS:
        for ranks in (1, 2, 4, 8):
            s = step(model, ranks)
            others = s.body + s.body_exchanges + s.loss_exchanges
            part, eager = ((ms + s.loss_exchanges) / (ms + others) for ms in (s.loss, s.eager))
            lines.append(
                f"| {model.name} | {ranks} | {s.body:.0f} ms | {s.body_exchanges:.1f} ms | {s.loss:.1f} ms "
                f"| {s.loss_exchanges:.2f} ms | {100 * part:.1f}% | {100 * eager:.1f}% | {memory_text(s.loss_bytes)} "
                f"| {memory_text(s.eager_bytes)} |"
            )
    return "\n".join(lines)


def draw(figure: Any) -> None:
    """Draw the loss's part of a step over the number of GPUs."""
    gpus = [8, 16, 32, 64, 128, 256, 512, 1024]
    colors = {1: "#6b7280", 2: "#0b5fd6", 4: "#c2772b", 8: "#1b7f5c"}
    for axes, model in zip(figure.subplots(1, 3), MODELS, strict=True):
        for ranks, color in colors.items():
            for fused, style in ((True, "-"), (False, ":")):
                shares = [(n, share(model, ranks, n, fused=fused)) for n in gpus]
                there = [(n, 100 * part) for n, part in shares if part is not None]
                label = f"TP {ranks}" if fused else None
                axes.plot(*zip(*there, strict=True), style, color=color, label=label)
        axes.set(title=model.name, xlabel="GPUs", xscale="log", ylim=(0, None))
        axes.set_xticks([8, 64, 512], ["8", "64", "512"])
    figure.axes[0].set_ylabel("the loss, % of a step")
    figure.axes[0].legend(frameon=False, title="dotted: eager")


def main() -> None:
    page = Path(sys.argv[1])
    before, _, rest = page.read_text(encoding="utf-8").partition("<!-- table -->\n")
    _, _, after = rest.partition("<!-- end -->\n")
    page.write_text(f"{before}<!-- table -->\n{table()}\n<!-- end -->\n{after}", encoding="utf-8")
    Path(sys.argv[2]).write_bytes(picture(draw, 9, 3.4, layout="constrained"))


if __name__ == "__main__":
    main()
