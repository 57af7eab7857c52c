"""Writes tests/manifests, or compares it with what this code does: what calls launch on an H100, and what they compute.

    PYTHONPATH=src python tools/manifests.py                # writes all of it
    PYTHONPATH=src python tools/manifests.py --check        # says what differs, and fails if anything does
    PYTHONPATH=src python tools/manifests.py jsd jax        # these parts alone

A part is a file: an op's launches in PyTorch, the code of their `kernels`, `jax` or `outputs`.  Other versions of the
libraries make other text, so a part that was written with other versions is not compared.
"""

import argparse
import difflib
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "manifests"
TORCH = (
    "linear_cross_entropy", "linear_cross_entropy_fp8", "linear_cross_entropy_soft", "linear_log_probs", "linear_jsd",
    "cross_entropy", "log_probs", "jsd", "grouped_matmul", "fp8_linear", "attention",
    "collective_matmul", "sharded",
)  # fmt: skip
PARTS = (*TORCH, "kernels", "jax", "outputs")
QUICK_OUTPUTS = ("linear_cross_entropy everything", "jsd", "grouped_matmul", "attention everything")
QUICK_JAX = ("linear_cross_entropy mosaic_gpu plain",)


def made_with(part: str) -> dict[str, str]:
    names = {"jax": ("jax", "jaxlib"), "outputs": ("torch", "triton", "numpy")}.get(part, ("torch", "triton"))
    return {name: version(name).partition("+")[0] for name in names}


def make(part: str, quick: bool) -> dict[str, list[str]]:
    """The lines of a part's cases; if `quick`, only of the quick ones."""
    if part == "jax":
        import lowered

        few = [x for x in lowered.CASES if "mosaic" not in x][::14]
        return {x: lowered.CASES[x]() for x in ((*QUICK_JAX, *few) if quick else lowered.CASES)}
    if part == "outputs":
        import hashed

        names = [f"interpreted: {x}" for x in QUICK_OUTPUTS] if quick else [*hashed.CASES]
        return hashed.outputs(names)
    import launched_cases

    if part == "kernels":
        import kernel_texts

        runs = [run for cases in launched_cases.CASES.values() for run in cases.values()]
        return kernel_texts.kernels(runs[:: 192 if quick else 1])
    cases = launched_cases.CASES[part]
    return {name: run() for name, run in [*cases.items()][:: 6 if quick else 1]}


def arithmetic() -> str:
    import hashed

    return hashed.arithmetic()


def write(part: str) -> None:
    made = {"made with": made_with(part), "cases": make(part, False)}
    if part == "outputs":
        made["arithmetic"] = arithmetic()
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{part}.json").write_text(json.dumps(made, indent=1) + "\n")


def differences(part: str, quick: bool) -> list[str]:
    """What this code does differently."""
    kept = json.loads((FOLDER / f"{part}.json").read_text())
    if kept["made with"] != made_with(part):
        print(f"{part}: not compared, since it was made with {kept['made with']}")
        return []
    made = make(part, quick)
    expected = {name: kept["cases"].get(name, []) for name in made} if quick else kept["cases"]
    if part == "kernels" and quick:  # of a kernel's kinds some
        expected = {name: sorted({*lines} & {*made[name]}) for name, lines in expected.items()}
    if part == "outputs" and kept["arithmetic"] != arithmetic():
        made = {name: _nearly(lines, expected.get(name, [])) for name, lines in made.items()}
    lines = []
    for name in dict.fromkeys([*expected, *made]):
        before, after = expected.get(name, []), made.get(name, [])
        if before != after:
            lines += [
                f"{part}: {name}",
                *(f"  {x}" for x in [*difflib.unified_diff(before, after, n=0, lineterm="")][2:]),
            ]
    return lines


def _nearly(lines: list[str], expected: list[str]) -> list[str]:
    """The expected lines, if `lines` say the same by another machine's arithmetic; otherwise `lines`."""
    import hashed

    if len(lines) != len(expected) or not all(map(hashed.same, expected, lines)):
        return lines
    return expected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"one of {', '.join(PARTS)}; default: all")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--quick", action="store_true", help="compare a sixth of the cases, or fewer if they are slow")
    given = parser.parse_args()
    for part in given.parts:
        if part not in PARTS:
            parser.error(f"part must be one of {', '.join(PARTS)}; got {part!r}")
    if given.quick and not given.check:
        parser.error("--quick works with --check only: all cases are written")
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(ROOT / "tests"))
    found = []
    for part in given.parts or PARTS:
        if given.check:
            found += differences(part, given.quick)
        else:
            write(part)
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
