"""A plan in sentences.  Imports no framework."""

from collections.abc import Sequence

from onchip.core.sizes import MIB, UNITS
from onchip.plan.asked import PlannedCall, planned_op
from onchip.plan.document import Baseline, Row
from onchip.plan.gpus import GPUS
from onchip.plan.links import Exchange
from onchip.plan.models import ModelSizes


def budget_text(size: int) -> str:
    """A budget as scratch_bytes takes it, to two digits after the point below 1000."""
    if size < UNITS["KiB"]:
        return str(size)
    exact = [unit for unit in ("GiB", "MiB") if size >= UNITS[unit] and 100 * size % UNITS[unit] == 0]
    largest = next(unit for unit in ("GiB", "MiB", "KiB") if size >= UNITS[unit])
    unit = next(iter(exact), largest)
    number = 100 * size // UNITS[unit] / 100
    return f"{number:{'.0f' if number >= 1000 else 'g'}}{unit}"


def memory_text(size: int) -> str:
    """Rounded up, so that what fits in the printed number fits."""
    if size >= UNITS["GiB"]:
        parts = 10 if size >= 10 * UNITS["GiB"] else 100
        return f"{-(-parts * size // UNITS['GiB']) / parts:g} GiB"
    return f"{-(-size // MIB)} MiB" if size >= 10 * MIB else f"{-(-10 * size // MIB) / 10:.1f} MiB"


def time_text(ms: float | None) -> str:
    if ms is None:
        return "-"
    return f"{ms:.2f} ms" if ms < 10 else f"{ms:.1f} ms" if ms < 100 else f"{ms:.0f} ms"


def _needs(size: int | None, ms: float | None) -> str:
    said = [memory_text(size)] if size is not None else []
    return " and ".join([*said, *([time_text(ms)] if ms is not None else [])])


def verdict(asked: PlannedCall, plain: Baseline, compiled: Baseline | None, rows: Sequence[Row]) -> str:
    if asked.linears:
        return _verdict_of_layers(asked, plain, rows)
    default = next(row for row in rows if row.name == "default")
    name = plain.name if "." in plain.name else plain.name[0].upper() + plain.name[1:]
    if needs := _needs(plain.memory_bytes, plain.ms):
        by_compiler = f", {compiled.name} {_needs(compiled.memory_bytes, compiled.ms)}" if compiled else ""
        said = f"{name} needs {needs}{by_compiler}; onchip by default {_needs(default.memory_bytes, default.ms)}."
    else:
        said = f"By default onchip needs {_needs(default.memory_bytes, default.ms)}."
    last = rows[-1]
    if any(row.name not in ("smallest", "default", "fastest", "largest") for row in rows):
        fitting = [f"With {row.name}: {_needs(row.memory_bytes, row.ms)}." for row in rows[1:] if row.fits]
        small = [f"A budget of {row.name} is too small." for row in rows[1:] if not row.fits]
        return " ".join([said, *fitting, *small])
    if default.ms is None:
        return said
    if last.name != "fastest" or last.ms is None or last.scratch_bytes is None:
        return f"{said} More memory makes it no faster."
    faster = 100 * (default.ms / last.ms - 1)
    budget = budget_text(last.scratch_bytes)
    return f'{said} For {faster:.0f}% more speed give it {memory_text(last.scratch_bytes)}: scratch_bytes="{budget}".'


def _verdict_of_layers(asked: PlannedCall, plain: Baseline, rows: Sequence[Row]) -> str:
    times = [row.ms for row in rows if row.ms is not None]
    layers = "the layer" if len(rows) == 1 else "the linear layers of a block"
    kept = sum(size for row in rows for name, size in (row.memory_parts or {}).items() if name.startswith("kept"))
    keeps = f"keeps {memory_text(kept)} until backward" if kept else ""
    if all(row.sent_bytes is not None for row in rows):
        if asked.ranks == 1:
            return "One rank sends nothing: say how many ranks share the layers (tensor_parallel, --tp)."
        sent = memory_text(sum(row.sent_bytes or 0 for row in rows))
        return f"For these layers each rank sends {sent}, while it multiplies {asked.ranks} blocks of each."
    if plain.ms is None or len(times) < len(rows):
        return f"For {layers}, {asked.op} {keeps or 'keeps nothing'}."
    faster = 100 * (plain.ms / sum(times) - 1)
    said = f"For {layers}, {plain.name} takes {time_text(plain.ms)}; {asked.op} takes {time_text(sum(times))} "
    said += f"({faster:.0f}% faster)" if faster >= 0 else f"({-faster:.0f}% slower)"
    return f"{said} and {keeps}." if keeps else f"{said}."


def notes(
    asked: PlannedCall,
    backend: str,
    rows: Sequence[Row],
    plain: Baseline,
    vocab: int | None,
    ranks: int,
    found: ModelSizes | None,
) -> list[str]:
    """What the numbers leave out, and where the times come from; `vocab` is the whole one, which `ranks` share."""
    p, gpu, op = asked.problem, GPUS[asked.gpu], planned_op(asked.op)
    softcap = found.softcap if found is not None else None
    timed = any(row.ms is not None for row in rows)
    lacking = (
        "on the CPU"
        if p.device == "cpu"
        else f"for the {gpu.title}, where none was measured"
        if gpu.faster_memory is None
        else "for float32 products"
        if p.dtype == "float32"
        else f"for backend {backend}"
    )
    shared = f"with {p.vocab} of the {vocab} entries of the vocabulary. Times and memory leave out what ranks exchange"
    shared += "." if op.numbers else ", which is not predicted."
    layers, of_ranks = bool(asked.linears), f"This is one of {ranks} ranks"
    capped = f"pass softcap={softcap or 0:g}. The prediction for {plain.name} leaves the cap out."
    said = {
        op.source or gpu.source: timed or plain.ms is not None,
        f"onchip's time is not predicted {lacking}.": not timed,
        "Memory and products are the same on every GPU.": p.device == "cuda" and asked.gpu != "h100" and not layers,
        f"{of_ranks}. Sums travel in float32.": ranks > 1 and layers,
        f"{of_ranks}, {shared}": ranks > 1 and not layers,
        "The times leave out reading x by rows and summing its gradient.": timed and asked.rows > 0,
        "FP8 products are an approximation.": asked.precision == "fp8" or op.fp8,
        "The model's head shares its weight with the embedding.": found is not None and found.tied and p.hidden > 0,
        f"The model caps its logits, and {asked.op} has no softcap.": bool(softcap) and not layers and not p.softcap,
        f"The model caps its logits: {capped}": p.softcap,
    }
    return [note for note, holds in said.items() if holds]


def note_of_exchanges(sent: Sequence[Exchange], link: float | None, ms: float | None) -> str:
    """What ranks exchange in a call that takes `ms` without it."""
    said = f"Each rank sends {memory_text(sum(x.bytes for x in sent))}"
    exposed = [x.exposed_ms for x in sent if x.exposed_ms is not None]
    if link is None:
        return f"{said}. Give link, the GB/s from one rank to another, to predict how long that takes."
    if len(exposed) < len(sent):
        return f"{said} at {link:g} GB/s."
    total = sum(exposed)
    part = f" ({100 * total / (total + ms):.0f}% of the call by default)" if ms else ""
    return f"{said} at {link:g} GB/s, of which {time_text(total)} is exposed{part}."
