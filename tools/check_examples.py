"""Check the types of the examples in README.md and docs/ with mypy and pyright, and of calls that both must reject.

Each page's Python blocks become one module, in which a line has the number that it has on the page.  Blocks that the
tests skip, and pages in `SKIPPED`, whose packages aren't installed for development, are left out.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")))
SKIPPED = ("docs/guides/stacks.md", "docs/guides/torchtitan.md")
SCRIPTS = ("docs/guides/train.py",)
REJECTED = "tools/rejected_calls.py"
"""In this file each line that ends with `MARK` must be an error, and no other line may be one."""
MARK = "# rejected"
OUT = ROOT / "build" / "examples"

BLOCK = re.compile(r"^(?P<skip><!-- skip: next -->\n+)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
UNCHECKED = {
    # A number that is None of other rows.
    "assert default.memory_bytes < made.baseline.memory_bytes / 20",
    "assert fastest.ms < default.ms",
    # Attributes and items of torch.nn.Module, which has no types of them.
    'expected = theirs(model["lm_head"](hidden)[:, :-1], labels[:, 1:])',
    'assert same(lm_loss(model["lm_head"], hidden, labels), expected)',
    'assert not same(linear_cross_entropy(hidden, model["lm_head"].weight, labels, shift=True), expected)',
    'assert model.base_model.model.lm_head.lora_B["default"].weight.grad is not None',
    # A name that was a tensor before, in a function of its own.
    'loss = lambda kernel: jax_fp8_linear(x, kernel, weight_layout="kn").astype(jnp.float32).sum()',
    # None where there is no gradient, and no analysis.
    "assert abs(quotient - z.grad[0, 0]) < 1e-4",
    "assert compiled.memory_analysis().temp_size_in_bytes <= xla_memory.scratch_bytes(small, config)",
}
"""Lines whose errors aren't about this library's functions."""

# Strict, but that examples don't annotate functions of their own (whose bodies are checked all the same), and reuse
# names for another framework's arrays.
MYPY = """
[mypy]
mypy_path = src
strict = true
allow_redefinition = true
allow_untyped_globals = true
disallow_any_generics = false
disallow_incomplete_defs = false
disallow_subclassing_any = false
disallow_untyped_calls = false
disallow_untyped_decorators = false
disallow_untyped_defs = false
disable_error_code = no-redef

[mypy-onchip.*]
follow_imports = silent

[mypy-accelerate.*,datasets.*,flax.*,levanter.*,optax.*,peft.*,tokenizers.*,transformers.*,trl.*]
follow_imports = skip
ignore_missing_imports = true
"""
PYRIGHT = {"typeCheckingMode": "standard", "reportPrivateImportUsage": False}

Errors = dict[tuple[str, int], str]
"""Messages, by file and line."""


def write_modules() -> dict[str, str]:
    """Write the modules; returns the page of each."""
    OUT.mkdir(parents=True, exist_ok=True)
    for old in OUT.glob("*.py"):
        old.unlink()
    pages = {}
    for page in PAGES:
        text = (ROOT / page).read_text()
        lines = [""] * (text.count("\n") + 1)
        for match in BLOCK.finditer(text):
            if not match["skip"]:
                start = text.count("\n", 0, match.start("code"))
                code = match["code"].splitlines()
                lines[start : start + len(code)] = code
        if page not in SKIPPED and any(lines):
            module = OUT / (re.sub(r"\W", "_", page.removesuffix(".md")) + ".py")
            module.write_text("\n".join(lines))
            pages[str(module)] = page
    return pages | {str(ROOT / script): script for script in (*SCRIPTS, REJECTED)}


def mypy_errors(files: list[str]) -> Errors:
    config = OUT / "mypy.ini"
    config.write_text(MYPY)
    found = printed("mypy", "--config-file", str(config), "--output", "json", *files).splitlines()
    errors = [error for error in map(json.loads, found) if error["severity"] == "error"]
    return {(str(ROOT / x["file"]), x["line"]): x["message"] for x in errors}


def pyright_errors(files: list[str]) -> Errors:
    config = OUT / "pyrightconfig.json"
    config.write_text(json.dumps(PYRIGHT | {"include": files, "extraPaths": [str(ROOT / "src")]}))
    found = json.loads(
        printed("basedpyright", "--outputjson", "--project", str(config), "--pythonpath", sys.executable)
    )
    errors = [error for error in found["generalDiagnostics"] if error["severity"] == "error"]
    return {(x["file"], x["range"]["start"]["line"] + 1): x["message"] for x in errors}


def printed(tool: str, *arguments: str) -> str:
    """What the tool prints, whether it finds errors or not."""
    done = subprocess.run([sys.executable, "-m", tool, *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"{tool} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def source_line(file: str, line: int) -> str:
    return Path(file).read_text().splitlines()[line - 1].strip()


def main() -> None:
    pages = write_modules()
    lines = (ROOT / REJECTED).read_text().splitlines()
    wanted = {(str(ROOT / REJECTED), i) for i, line in enumerate(lines, 1) if line.endswith(MARK)}
    wrong = 0
    for name, errors_in in (("mypy", mypy_errors), ("pyright", pyright_errors)):
        errors = {at: x for at, x in errors_in(list(pages)).items() if source_line(*at) not in UNCHECKED}
        for file, line in sorted(wanted - set(errors)):
            print(f"{pages[file]}:{line}: {name} accepts this call")
        for file, line in sorted(set(errors) - wanted):
            print(f"{pages.get(file, file)}:{line}: {name}: {errors[file, line]}")
        wrong += len(wanted ^ set(errors))
    if wrong:
        sys.exit(1)
    print(f"{len(pages) - 1} pages and scripts are accepted, {len(wanted)} calls rejected, by mypy and by pyright")


if __name__ == "__main__":
    main()
