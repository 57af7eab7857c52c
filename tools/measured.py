"""Makes anew what README and docs show of results/: python tools/measured.py [--check]

It writes `docs/numbers.md`, the picture `docs/images/time-memory.svg`, and what stands in README and docs between
`<!-- numbers: NAME -->` and `<!-- end -->`, each from the newest file of its kind. With --check it writes nothing,
and fails if one of these differs from what results/ give, if a page shows a time or a size that is in no file to
which the page links, or a share or a ratio that doesn't follow from measurements (`ratios_in_prose`). `OWN_WORDS`
lists pages whose figures all stand between such marks.
"""

import argparse
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from figures_in_prose import figures, without_a_file
from plots import MODE, time_memory_svg
from ratios_in_prose import without_a_measurement

from onchip.bench.report import short_name
from onchip.bench.units import format_bytes, format_ms

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PICTURE = "docs/images/time-memory.svg"
NUMBERS = "docs/numbers.md"
OWN_WORDS = ("README.md", "docs/index.md")
ASSUMPTIONS = ("docs/benchmark_cases.md", "docs/guides/parallelism.md")
"""Pages whose shares are what a case or a prediction is made with."""

Row = Mapping[str, Any]
NO_BREAK = "\N{NO-BREAK SPACE}"
"""Stands between a number and its unit in a table."""

MODELS = {
    "llama3.1-8b": "Llama 3.1 8B", "llama3.2-1b": "Llama 3.2 1B", "qwen3-0.6b": "Qwen3 0.6B", "qwen3-4b": "Qwen3 4B",
    "qwen3-8b": "Qwen3 8B", "qwen3-32b": "Qwen3 32B", "qwen2.5-0.5b": "Qwen2.5 0.5B", "gemma2-9b": "Gemma 2 9B",
    "gemma3-270m": "Gemma 3 270M", "gemma3-1b": "Gemma 3 1B", "gemma3-4b": "Gemma 3 4B", "smollm": "SmolLM",
    "gpt-oss-120b": "gpt-oss 120B", "deepseek-v3": "DeepSeek-V3",
}  # fmt: skip
KINDS = {
    "frozen": "frozen head (LoRA)", "ignored": "90% ignored", "autocast": "float32 weight, autocast",
    "softcap": "softcap", "smoothing-z-loss": "label smoothing, z-loss", "per-token": "a loss per token",
}  # fmt: skip


# --------------------------------------------------------------------------------------------------- what was measured


class File(NamedTuple):
    """A file of results."""

    path: Path
    document: Mapping[str, Any]

    @property
    def rows(self) -> list[Row]:
        return list(self.document["rows"])

    @property
    def card(self) -> str:
        """ "H100", for "NVIDIA H100 80GB HBM3"."""
        named = re.search(r"\b[A-Z]+\d+\b", str(self.document["environment"].get("gpu")))
        return named[0] if named else "CPU"

    @property
    def benched(self) -> bool:
        return all({"case", "mode", "impl", "ok"} <= row.keys() for row in self.rows)

    def row(self, case: str, impl: str, mode: str = MODE) -> Row | None:
        """The right result of an implementation, whatever its version."""
        found = (
            r
            for r in self.rows
            if r["case"] == case and r["mode"] == mode and r["ok"] and short_name(r["impl"]) == impl
        )
        return next(found, None)

    def link(self, page: str, text: str = "file") -> str:
        up = "../" * (page.count("/"))
        return f"[{text}]({up}results/{self.path.name})"

    def others(self) -> set[str]:
        """Other libraries with their versions, by the first word of an implementation's name and its last."""
        of_rows = (re.fullmatch(r"([\w-]+)\b.* (\d[\w.]*)", str(row.get("impl"))) for row in self.rows)
        frameworks = "onchip", "torch", "XLA", "F", "jax"
        return {f"{found[1]} {found[2]}" for found in of_rows if found and found[1] not in frameworks}

    def told(self, page: str) -> str:
        """Card, date and versions, and a link to the file."""
        environment = self.document["environment"]
        names = {"torch": "PyTorch", "triton": "Triton", "jax": "JAX", "cuda": "CUDA", "driver": "driver"}
        names |= {"transformers": "transformers", "peft": "PEFT", "liger": "liger", "liger_kernel": "liger"}
        versions = [f"{name} {environment[key]}" for key, name in names.items() if environment.get(key)]
        versions += sorted(self.others())
        card = environment.get("gpu") or environment.get("cpu") or environment["device"]
        return f"{', '.join([card, self.path.name[:10], *versions])} ({self.link(page)})."


def newest(name: str, device: str = "h?00", *, fits: Callable[[File], bool] = lambda file: True) -> File | None:
    """The newest fitting file with a name such as "linear_cross_entropy-users"; of several from one day, the H100's."""
    found = sorted(
        RESULTS.glob(f"????-??-??-{device}-{name}.json"), key=lambda path: (path.name[:10], "-h100-" in path.name)
    )
    files = (File(path, json.loads(path.read_text(encoding="utf-8"))) for path in reversed(found))
    return next(filter(fits, files), None)


def needed(name: str, device: str = "h?00", *, fits: Callable[[File], bool] = lambda file: file.benched) -> File:
    file = newest(name, device, fits=fits)
    assert file is not None, name
    return file


def having(*columns: str) -> Callable[[File], bool]:
    """Files all of whose rows have these columns: a later script's file may have others."""
    return lambda file: all(row.keys() >= {*columns} for row in file.rows)


def with_row(case: str, impl: str = "onchip auto", mode: str = MODE) -> Callable[[File], bool]:
    """Files of `onchip bench` in which an implementation is right on a case."""
    return lambda file: file.benched and file.row(case, impl, mode) is not None


# ------------------------------------------------------------------------------------------------------------- tables


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines))


def cell(row: Row | None, best: float | None = None, *, name: str = "") -> str:
    """Time and memory; in bold if it is the best."""
    if row is None:
        return "-"
    ms = format_ms(row["median_ms"]).replace(" ", NO_BREAK)
    memory = "" if row.get("extra_bytes") is None else f", {format_bytes(row['extra_bytes']).replace(' ', NO_BREAK)}"
    return f"{name and f'{name} '}{f'**{ms}**' if row['median_ms'] == best else ms}{memory}"


def case_words(case: str) -> str:
    """ "Llama 3.1 8B, 8192 tokens, frozen head (LoRA)" for "llama3.1-8b-t8192-frozen"."""
    found = re.fullmatch(rf"({'|'.join(map(re.escape, MODELS))})(?:-t(\d+))?(?:-(.+))?", case)
    if found is None:
        return f"`{case}`"
    tokens = f"{found[2]} tokens" if found[2] else ""
    return ", ".join(filter(None, (MODELS[found[1]], tokens, KINDS.get(found[3] or "", found[3] or ""))))


def cases_by_implementations(file: File, shown: Mapping[str, str], mode: str = MODE) -> str:
    """A line for each case, and a column for each implementation that is right in one of them."""
    cases = dict.fromkeys(row["case"] for row in file.rows if row["mode"] == mode)
    columns = {impl: head for impl, head in shown.items() if any(file.row(case, impl, mode) for case in cases)}
    lines = []
    for case in cases:
        rows = [file.row(case, impl, mode) for impl in columns]
        best = min((row["median_ms"] for row in rows if row), default=None)
        if any(rows):
            lines.append([case_words(case), *(cell(row, best) for row in rows)])
    of_heads = any(words[0] != "`" for words, *_ in lines)
    return table(["head and tokens" if of_heads else "case", *columns.values()], lines)


def scalar(x: Any) -> str:
    return "-" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x).replace("|", "/")


def plain_rows(file: File) -> str:
    """The rows that a script wrote, as they are."""
    columns = [name for name in dict.fromkeys(name for row in file.rows for name in row) if name != "errors"]
    return table(columns, ([scalar(row.get(name)) for name in columns] for row in file.rows))


def without_a_time(file: File) -> str:
    """Where the result of ours was wrong."""
    cases = dict.fromkeys(f"`{r['case']}`" for r in file.rows if not r["ok"] and r["impl"].startswith("onchip"))
    return f"The file says why onchip has no time in {', '.join(cases)}." if cases else ""


def every_implementation(file: File) -> dict[str, str]:
    """All implementations in a file by name, ours first."""
    names = dict.fromkeys(short_name(row["impl"]) for row in file.rows)
    return {name: name.removesuffix(" auto") for name in sorted(names, key=lambda name: not name.startswith("onchip"))}


# ---------------------------------------------------------------------------------------------- what stands in pages


class Shown(NamedTuple):
    """A line of README's table: who trains what, and where it was measured."""

    who: str
    what: str
    file: str
    case: str
    ours: str = "onchip auto"
    plain: tuple[str, ...] = ("torch.compile",)
    mode: str = MODE
    median: str = "median_ms"
    others: tuple[str, ...] = ()  # functions of the framework that count beside other libraries


LINES = (
    Shown("an 8B model", "Llama 3.1 8B, 8192 tokens", "linear_cross_entropy-hopper-peers", "llama3.1-8b-t8192"),
    Shown("its LoRA", "the same, frozen head", "linear_cross_entropy-hopper-peers", "llama3.1-8b-t8192-frozen"),
    Shown("on answers", "the same, 90% ignored", "linear_cross_entropy-users", "llama3.1-8b-t8192-ignored"),
    Shown(
        "varying lengths", "Llama 3.1 8B, mean of 40 new lengths", "linear_cross_entropy-lengths",
        "llama3.1-8b-lengths", plain=("torch.compile(dynamic=True)",), mode="40 lengths, first time", median="mean_ms",
    ),
    Shown(
        "packed attention", "16384 tokens in documents", "attention", "documents-2048",
        plain=("torch flex_attention",), others=("torch varlen_attn", "torch SDPA"),
    ),
    Shown(
        "on two GPUs", "Llama 3.1 8B, 8192 tokens", "linear_cross_entropy-world2", "llama3.1-8b-t8192",
        plain=("torch.compile",),
    ),
    Shown("a small model", "Qwen3 0.6B, 8192 tokens", "linear_cross_entropy-hopper-peers", "qwen3-0.6b-t8192"),
    Shown("in JAX", "Llama 3.1 8B, 8192 tokens", "linear_cross_entropy-jax", "llama3.1-8b-t8192", plain=("XLA",)),
    Shown("short batches", "Llama 3.1 8B, 512 tokens", "linear_cross_entropy-hopper-peers", "llama3.1-8b-t512"),
)  # fmt: skip


def measured_of(line: Shown) -> tuple[File | None, list[Row]]:
    """The file of a line and its right rows.  Before `--suite lengths` was run, a script timed onchip alone."""
    file = newest(line.file, fits=with_row(line.case, line.ours, line.mode))
    of_script = newest("lengths", "h200", fits=having("call"))
    if file is None and line.median == "mean_ms" and (file := of_script) is not None:
        known = (row for row in file.rows if row["call"].startswith("40 lengths") and row.get("after_mean_ms"))
        return file, [{"impl": f"{line.ours} then", "median_ms": row["after_mean_ms"]} for row in known]
    if file is None:
        return None, []
    right = (
        r for r in file.rows if (r["mode"], r["case"], r["ok"]) == (line.mode, line.case, True) and r.get(line.median)
    )
    return file, [{**row, "median_ms": row[line.median]} for row in right]


def few_rows(page: str) -> str:
    """At most six lines: ours, what the framework compiles, and the fastest of other libraries."""
    lines: list[list[str]] = []
    files: dict[Path, File] = {}
    for line in LINES:
        file, rows = measured_of(line)
        ours = next((row for row in rows if short_name(row["impl"]) == line.ours), None)
        if file is None or ours is None or len(lines) == 6:
            continue
        plain = next((row for row in rows if row["impl"].startswith(line.plain)), None)
        of_framework = "onchip", "torch", "XLA"
        others = [r for r in rows if not r["impl"].startswith(of_framework) or r["impl"].startswith(line.others or "-")]
        other = min(others, key=lambda row: row["median_ms"], default=None)
        best = min(row["median_ms"] for row in (ours, plain, other) if row) if plain or other else None
        name = "" if other is None else OTHERS.get(short_name(other["impl"]), short_name(other["impl"]))
        lines.append([line.who, line.what, cell(ours, best), cell(plain, best), cell(other, best, name=name)])
        files[file.path] = file
    heads = ["you train", "head and tokens", "onchip", "compiled", "best other"]
    named = ", ".join(f"{file.link(page, str(i))} on an {file.card}" for i, file in enumerate(files.values(), 1))
    return f"{table(heads, lines)}\n\n{filled(f'Files: {named}.')}"


OTHERS = {
    "liger for Hopper": "Liger", "liger": "Liger", "liger for Hopper, scaled": "Liger, scaled", "quack base": "QuACK",
    "quack scaled-exp": "QuACK", "torch varlen_attn": "varlen_attn", "torch SDPA, cuDNN": "cuDNN",
    "onchip auto": "onchip, default",
}  # fmt: skip


def filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def pitch(page: str) -> str:
    """How often it is as fast as torch.compile, and with what part of its memory."""
    file, both = pairs("linear_cross_entropy-users", "onchip auto", "torch.compile")
    as_fast = sum(a["median_ms"] <= 1.01 * b["median_ms"] for _, a, b in both)
    memory = statistics.median(a["extra_bytes"] / b["extra_bytes"] for _, a, b in both)
    return filled(
        f"On an {file.card} it matches or beats torch.compile in {as_fast} of {len(both)} cases, with "
        f"{100 * memory:.0f}% of the memory in the median case ({file.link(page, 'results')})."
    )


def caption(page: str) -> str:
    file, case = pictured()
    return filled(
        f"{case_words(case)} on one {file.card}, forward and backward; nearer the lower left corner is better "
        f"({file.link(page, 'results')}). Dashed: the three matrix products that any exact method needs."
    )


def pictured() -> tuple[File, str]:
    return needed(LINES[0].file, fits=with_row(LINES[0].case)), LINES[0].case


def step(page: str) -> str:
    """What a training step takes in transformers, without onchip and with it."""
    by_loss = {"onchip's patch": None, "default loss": None}

    def fits(file: File) -> bool:
        there = {row["loss"] for row in file.rows if row["model"] == file.rows[0]["model"] and row.get("median_ms")}
        return there >= by_loss.keys()

    file = needed("training-step", fits=lambda file: having("model", "loss")(file) and fits(file))
    first = {row["loss"]: row for row in reversed(file.rows) if row["model"] == file.rows[0]["model"]}
    ours, default = (first[name] for name in by_loss)
    return filled(
        f"A training step of {ours['model']} tokens with transformers peaks at {ours['peak_gib']:.1f} GiB in place of "
        f"{default['peak_gib']:.1f} GiB. It takes {ours['median_ms']:.0f} ms, without onchip "
        f"{default['median_ms']:.0f} ms, on an {file.card} ({file.link(page, 'results')})."
    )


def one_case(page: str, name: str, case: str) -> str:
    """What every implementation takes whose result is right, the fastest first."""
    file = needed(name, fits=with_row(case))
    rows = [row for row in file.rows if row["case"] == case and row["mode"] == MODE and row["ok"]]
    lines = [
        [
            OURS.get(short_name(row["impl"]), short_name(row["impl"])),
            format_ms(row["median_ms"]),
            format_bytes(row["extra_bytes"]),
        ]
        for row in sorted(rows, key=lambda row: row["median_ms"])
    ]
    said = f"{case_words(case)}, forward and backward, on an {file.card} ({file.link(page)}):"
    return f"{filled(said)}\n\n{table(['', 'time', 'extra memory'], lines)}"


def pairs(name: str, ours: str, other: str) -> tuple[File, list[tuple[str, Row, Row]]]:
    """The newest file with both implementations, and the cases in which both are right, with their rows."""

    def of(file: File) -> list[tuple[str, Row, Row]]:
        cases = dict.fromkeys(row["case"] for row in file.rows)
        both = ((case, file.row(case, ours), file.row(case, other)) for case in cases)
        return [(case, a, b) for case, a, b in both if a and b]

    file = needed(name, fits=lambda file: file.benched and of(file) != [])
    return file, of(file)


def slower(page: str) -> str:
    """Cases in which the compiled plain expression takes over 1% less time than our default."""
    lines, files = [], []
    for framework, name, other in (
        ("PyTorch", "linear_cross_entropy-users", "torch.compile"),
        ("JAX", "linear_cross_entropy-jax", "XLA, 16-bit logits, gathered"),
    ):
        file, both = pairs(name, "onchip auto", other)
        files.append(f"{framework} on an {file.card} ({file.link(page)})")
        for case, a, b in both:
            if (ratio := a["median_ms"] / b["median_ms"]) > 1.01:
                times = f"{b['extra_bytes'] / a['extra_bytes']:.1f} times the memory"
                what = f"{framework}: {case_words(case)}"
                lines.append([what, f"{100 * (ratio - 1):.0f}%", f"{other.split(',')[0]} takes {times}"])
    said = f"{' and '.join(files)}; in their other cases it was not slower by over 1%."
    return f"{table(['where', 'by', 'and'], lines)}\n\n{filled(said)}"


def xla(page: str) -> str:
    """How often XLA is faster, and how much memory it then takes."""
    file, both = pairs("linear_cross_entropy-jax", "onchip auto", "XLA, 16-bit logits, gathered")
    faster = [(a["median_ms"] / b["median_ms"], b["extra_bytes"] / a["extra_bytes"]) for _, a, b in both]
    lost = [time for time, _ in faster if time > 1.01]
    memory = statistics.median(memory for _, memory in faster)
    how = f"by {100 * (max(lost) - 1):.0f}% at most, in" if lost else "and takes"
    return filled(
        f"In {len(lost) or 'none'} of {len(both)} cases on an {file.card} XLA's plain expression is over 1% faster "
        f"than onchip, {how} {memory:.0f} times the memory in the median case ({file.link(page, 'results')})."
    )


OURS = {"onchip auto": "**onchip**", "onchip, no bound": "**onchip**, no bound on memory"}
BLOCKS: dict[str, Callable[..., str]] = {
    "pitch": pitch, "caption": caption, "table": few_rows, "step": step, "case": one_case, "slower": slower, "xla": xla,
}  # fmt: skip
_BLOCK = re.compile(r"(<!-- numbers: ([^\n]+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def with_blocks(page: str, text: str) -> str:
    """The page's text, with what stands between marks made anew."""

    def anew(found: re.Match[str]) -> str:
        name, *given = found[2].split()
        return f"{found[1]}{BLOCKS[name](page, *given)}\n{found[4]}"

    return _BLOCK.sub(anew, text)


# ------------------------------------------------------------------------------------------------------------ the page


def training_steps(page: str) -> str:
    """Training steps, from the files of both cards, and those with packed documents."""
    said = []
    for name, device in (("training-step", "h100"), ("training-step", "h200"), ("training-step-packed", "h?00")):
        file = newest(name, device, fits=having("model", "loss"))
        if file is None:
            continue
        models, losses = (dict.fromkeys(row[name] for row in file.rows) for name in ("model", "loss"))
        lines = []
        for model in models:
            of = {
                loss: [r for r in file.rows if (r["model"], r["loss"]) == (model, loss) and r.get("median_ms")]
                for loss in losses
            }
            cells = (
                f"{rows[0]['median_ms']:.0f} ms, {rows[0]['peak_gib']:.1f} GiB" if rows else "-" for rows in of.values()
            )
            lines.append([model, *cells])
        said.append(f"{table(['model, batch x tokens', *losses], lines)}\n\n{file.told(page)}")
    return "\n\n".join(said)


def experts_layer(page: str) -> str:
    file = needed("grouped_matmul-layer", fits=having("impl", "of", "median_ms"))
    lines = [[row["impl"], row["of"], cell(row)] for row in file.rows]
    return f"{table(['layer', 'passes', 'time, extra memory'], lines)}\n\n{file.told(page)}"


def host(page: str) -> str:
    file = needed("host", fits=having("call", "forward_in_a_row_ms", "backward_after_wait_ms"))
    ways = {"in a row": "in_a_row", "after a wait": "after_wait"}
    lines = [
        [row["call"], *(f"{row[f'forward_{x}_ms']:.2f} + {row[f'backward_{x}_ms']:.2f} ms" for x in ways.values())]
        for row in file.rows
    ]
    return f"{table(['call', *ways], lines)}\n\n{file.told(page)}"


def lengths(page: str) -> str:
    """A cold start, and lengths that weren't seen before, as `--suite lengths` measured them."""
    said = []
    of_bench = newest("linear_cross_entropy-lengths", fits=having("mode", "impl", "mean_ms", "ok"))
    for file in filter(None, (of_bench, newest("lengths", "h200", fits=having("call")))):
        if file == of_bench:
            impls = dict.fromkeys(short_name(row["impl"]) for row in file.rows)
            of = {(row["mode"], short_name(row["impl"])): row["mean_ms"] for row in file.rows if row["ok"]}
            modes = dict.fromkeys(row["mode"] for row in file.rows)
            best = {mode: min(ms for (other, _), ms in of.items() if other == mode) for mode, _ in of}
            made = {key: f"**{format_ms(ms)}**" if ms == best[key[0]] else format_ms(ms) for key, ms in of.items()}
            lines = [[mode, *(made.get((mode, impl), format_ms(None)) for impl in impls)] for mode in modes]
            said.append(f"{table(['what is timed', *impls], lines)}\n\n{file.told(page)}")
            continue
        known = [row for row in file.rows if "after_ms" in row or "after_mean_ms" in row]
        lines = [
            [
                row["call"],
                format_ms(row.get("after_ms", row.get("after_mean_ms"))),
                format_ms(row.get("after_worst_ms")),
            ]
            for row in known
        ]
        said.append(f"{table(['call', 'time', 'worst'], lines)}\n\n{file.told(page)}")
    return "\n\n".join(said)


def benched(name: str, shown: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """The newest file of `onchip bench` with a name: a table for each mode, or for forward and backward alone."""

    def made(page: str) -> str:
        file = needed(name, fits=lambda file: file.benched or "title" in file.document)
        if not file.benched:
            return f"{file.document['title']}:\n\n{plain_rows(file)}\n\n{file.told(page)}"
        columns = shown or every_implementation(file)
        modes = list(dict.fromkeys(row["mode"] for row in file.rows))
        whole = [mode for mode in modes if mode == MODE] or modes
        said = [
            f"{f'{mode}:{chr(10)}{chr(10)}' if len(whole) > 1 else ''}{cases_by_implementations(file, columns, mode)}"
            for mode in whole
        ]
        return "\n\n".join([*said, " ".join(filter(None, (file.told(page), without_a_time(file))))])

    return made


USERS = {
    "onchip auto": "onchip", "onchip, no bound": "onchip, no bound on memory", "torch.compile": "torch.compile",
    "liger": "Liger", "XLA, 16-bit logits, gathered": "XLA",
}  # fmt: skip
SECTIONS: Sequence[tuple[str, str, Callable[[str], str], str]] = (
    ("linear_cross_entropy in PyTorch", "Default arguments, in bfloat16, forward and backward: time and extra memory.",
     benched("linear_cross_entropy-users", USERS), "linear_cross_entropy-users"),
    ("The newest kernels of other libraries", "The same call beside Liger's functions for Hopper and QuACK, which was "
     "tuned for each case.", benched("linear_cross_entropy-hopper-peers"), "linear_cross_entropy-hopper-peers"),
    ("linear_cross_entropy in JAX", "Beside XLA's best plain expression, with logits in 16 bits. Some heads go in "
     "[other chunks](internals/linear_cross_entropy_measured.md) since, and 512 tokens have other tiles.",
     benched("linear_cross_entropy-jax", USERS), "linear_cross_entropy-jax"),
    ("A training step with transformers", "Gradient checkpointing and AdamW: median time and peak memory.",
     training_steps, "training-step"),
    ("Lengths that weren't seen before", "Llama 3.1 8B's head.", lengths, "lengths"),
    ("What the host takes", "The time to launch forward and backward, by `tools/host_times.py`.", host, "host"),
    ("linear_log_probs", "", benched("linear_log_probs"), "linear_log_probs"),
    ("linear_jsd", "", benched("linear_jsd"), "linear_jsd"),
    ("cross_entropy", "", benched("cross_entropy"), "cross_entropy"),
    ("attention", "", benched("attention"), "attention"),
    ("attention by length", "Batches of sequences of the length in the name.", benched("attention-by-length"),
     "attention-by-length"),
    ("attention in JAX", "", benched("attention-jax"), "attention-jax"),
    ("fp8_linear", "Layers of seven models, with one, two and four sequences; the number is in the name.",
     benched("fp8_linear", {"onchip auto": "onchip", "torch nn.Linear": "nn.Linear"}), "fp8_linear"),
    ("A layer of experts", "Qwen3 30B-A3B's, 8192 tokens, sorting included.", experts_layer, "grouped_matmul-layer"),
    ("grouped_matmul", "The products alone.", benched("grouped_matmul"), "grouped_matmul"),
    ("grouped_matmul in JAX", "", benched("grouped_matmul-jax"), "grouped_matmul-jax"),
    ("Two or more GPUs", "The vocabulary split over ranks.", benched("linear_cross_entropy-world?"),
     "linear_cross_entropy-world?"),
    ("collective_matmul", "", benched("collective_matmul-world?"), "collective_matmul-world?"),
)  # fmt: skip


def numbers_page() -> str:
    """docs/numbers.md: a section for each kind of file that exists."""
    page, parts = NUMBERS, [NUMBERS_INTRO]
    for title, words, made, name in SECTIONS:
        if newest(name) is not None:
            parts.append("\n\n".join(filter(None, (f"## {title}", words, made(page)))))
    return "\n\n".join(parts) + "\n"


NUMBERS_INTRO = """# The numbers

What `onchip bench` measured was checked against a reference first; what was wrong has no time. The fastest is bold.
Times are medians where nothing else is said. Memory is the peak above inputs and returned gradients. `python
tools/measured.py` makes this page from the files in `results/`; [all files](results.md), [how they were
measured](benchmarks.md), and [what was tried](internals/tried.md) are on pages of their own."""


# ------------------------------------------------------------------------------------------------------ what is checked


def strangers(page: str, text: str) -> list[str]:
    """The figures that come from no file: on pages in `OWN_WORDS` those outside of marks, on other pages those that are
    in no file to which they link, and every share if they link to none. NUMBERS is made whole.
    """
    if page in OWN_WORDS:
        return [" ".join(one) for one in figures(_BLOCK.sub(" ", text))]
    found = [" ".join(one) for one in without_a_file(text, RESULTS)]
    if page not in (*ASSUMPTIONS, NUMBERS):
        found += without_a_measurement(_BLOCK.sub(" ", text), RESULTS)
    return found


def made_anew() -> dict[str, str]:
    """What is made from results, by path."""
    file, case = pictured()
    named = [{**row, "impl": f"{OTHERS.get(short_name(row['impl']), short_name(row['impl']))} "} for row in file.rows]
    of_case = [{**row, "case": case_words(case)} for row in named if row["case"] == case]
    made = {PICTURE: time_memory_svg(of_case, case_words(case), [MODE]), NUMBERS: numbers_page()}
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if _BLOCK.search(text):
            page = str(path.relative_to(ROOT))
            made[page] = with_blocks(page, text)
    return made


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _compared(page: str, text: str) -> Any:
    """Of a picture what it says, since another version of matplotlib draws other paths."""
    return re.findall(r"<text[^>]*>([^<]+)", text) if page.endswith(".svg") else text


def wrong() -> list[str]:
    """What has to be mended, one line each."""
    said = []
    for page, text in made_anew().items():
        there = (ROOT / page).read_text(encoding="utf-8") if (ROOT / page).exists() else ""
        if _compared(page, there) != _compared(page, text):
            said.append(f"{page} is not what results/ give; run python tools/measured.py")
    for path in pages():
        page = str(path.relative_to(ROOT))
        if found := strangers(page, path.read_text(encoding="utf-8")):
            where = (
                "outside of marks"
                if page in OWN_WORDS
                else "that don't follow from files which it links to (tools/ratios_in_prose.py)"
            )
            said.append(f"{page} has figures {where}: {', '.join(found)}")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if something differs")
    if parser.parse_args().check:
        sys.exit("\n".join(wrong()) or None)
    for page, text in made_anew().items():
        (ROOT / page).write_text(text, encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main()
