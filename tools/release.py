"""Builds the package, checks what was built, and tries it in bare environments.  Nothing is uploaded.

    python tools/release.py --url https://HOST/ORG/onchip  every Python that is supported; all must be installed
    python tools/release.py --python 3.11 --python 3.12    these alone
    python tools/release.py --without 3.12:torch           without an extra, in one Python or ("torch") in all
    python tools/release.py --all-tests                    every test of the sdist instead of a few
    python tools/release.py --draft                        before the tag: also from changed files, and without --url

The sources contain no address of the repository.  --url fills it in when the package is built: in the project's links,
in README's, which are relative there, and in CITATION.cff's.

What is to be uploaded is in build/release/dist afterwards.  The environments are made below build/release too, with the
versions of constraints.txt and PyTorch's CPU build.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "release"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = ROOT / "constraints.txt"
# In an environment of their own: cffconvert wants an older jsonschema than the tests.
TOOLS = ("build==1.6.1", "cffconvert==2.0.0", "check-wheel-contents==0.6.3", "twine==7.0.0")
SUPPORTED = [c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]

TORCH = """
import torch
import torch.nn.functional as F
from onchip.torch import linear_cross_entropy

hidden, weight = torch.randn(8, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
target = torch.randint(50, (8,))
expected = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, target), (hidden, weight))
got = torch.autograd.grad(linear_cross_entropy(hidden, weight, target), (hidden, weight))
torch.testing.assert_close(got, expected)
"""
JAX = """
import jax
import numpy as np
from onchip.jax import linear_cross_entropy

hidden, weight = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(8, 16), (50, 16)]))
labels = jax.random.randint(jax.random.key(2), (8,), 0, 50)
expected = -jax.nn.log_softmax(hidden @ weight.T)[np.arange(8), labels].mean()
np.testing.assert_allclose(jax.jit(linear_cross_entropy)(hidden, weight, labels), expected, rtol=1e-5)
"""
TRANSFORMERS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import onchip.integrations.trl
from onchip.integrations.transformers import patch

sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model, ids = LlamaForCausalLM(LlamaConfig(**sizes)), torch.randint(50, (2, 8))
expected = model(input_ids=ids, labels=ids).loss
report = patch(model)
torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)
assert report.losses == 1, report
"""
NOT_INSTALLED = """
import importlib
for module, extra in {modules}:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        assert "pip install 'onchip[" + extra + "]'" in str(error), error
    else:
        raise AssertionError(module + " was imported without its framework")
"""
SMALL_DEMO = ("demo", "--device", "cpu", "--steps", "3", "--vocab", "512", "--tokens", "256")
SMALL_CHECK = ("cross_entropy", "linear_log_probs", "--device", "cpu")
TESTS = ("test_packaging.py", "test_backends.py", "test_every_loss.py", "test_losses_errors.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--python", action="append", choices=SUPPORTED, help="a Python to try; repeat it for more")
    parser.add_argument(
        "--without", action="append", default=[], metavar="[PYTHON:]EXTRA", help="an extra to leave out: torch or jax"
    )
    parser.add_argument("--all-tests", action="store_true", help="run every test of the sdist")
    parser.add_argument(
        "--draft", action="store_true", help="take changed files too; without --url, fill in no address"
    )
    parser.add_argument("--url", help="the address of the repository")
    given = parser.parse_args()
    if given.url is None and not given.draft:
        parser.error("give --url, the repository's address, or --draft")
    for name in given.without:
        if name.rpartition(":")[2] not in ("torch", "jax") or name.rpartition(":")[0] not in ("", *SUPPORTED):
            parser.error(f"--without takes torch or jax, after a Python and a colon or alone; got {name!r}")
    pythons = {version: find_python(version) for version in given.python or SUPPORTED}
    if missing := [version for version, path in pythons.items() if path is None]:
        sys.exit(f"no Python {', '.join(missing)} here: install it, or name those to try with --python")
    if not given.draft:
        check_repository(given.url)
    shutil.rmtree(FOLDER, ignore_errors=True)
    wheel, sdist = build(source(given.url))
    for version, path in pythons.items():
        left_out = {name.removeprefix(f"{version}:") for name in given.without}
        try_wheel(version, str(path), wheel, left_out)
        if left_out & {"torch", "jax"}:
            say(f"Python {version}: the tests need torch and jax, so they were left out")
        else:
            run_tests(version, wheel, sdist, given.all_tests)
    skipped = [v for v in SUPPORTED if v not in pythons] + given.without + ["the repository"] * given.draft
    if skipped:
        say(f"what was tried passed; before an upload try the rest: {', '.join(skipped)}")
    else:
        say(f"all of it passed; to upload: {FOLDER / 'tools/bin/twine'} upload {wheel} {sdist}")


# ------------------------------------------------------------------------------------------------------------- before


def find_python(version: str) -> str | None:
    """The interpreter with this version: from the PATH, from pyenv, or one that uv has installed."""
    candidates = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    if shutil.which("uv"):
        candidates.append(said("uv", "python", "find", "--no-python-downloads", version))
    for candidate in filter(None, candidates):
        # pyenv's shims lie on the PATH for versions that aren't chosen, and fail.
        if said(str(candidate), "-c", "import sys; print('%d.%d' % sys.version_info[:2])") == version:
            return str(candidate)
    return None


def check_repository(url: str) -> None:
    """Check that the commit and the address that the package will name are those of this checkout."""
    if said("git", "status", "--porcelain"):
        sys.exit("files differ from the commit: commit them, or try with --draft")
    origin = said("git", "remote", "get-url", "origin")
    if re.sub(r"^git@([^:]+):", r"https://\1/", origin).removesuffix(".git") != url:
        sys.exit(f"--url is {url}; the remote 'origin' is {origin or 'missing'}: correct one of them")
    if f"v{package_version()}" not in said("git", "tag", "--points-at", "HEAD").split():
        sys.exit(f"the commit has no tag v{package_version()}, which the package's links lead to")


# -------------------------------------------------------------------------------------------------------------- build


def with_address(name: str, text: str, url: str) -> str:
    """pyproject.toml, README.md or CITATION.cff with the repository's address; links to pictures become links to raw
    files.
    """
    tag = f"v{package_version()}"
    if name == "pyproject.toml":
        changes, issues, pages = f"{url}/blob/{tag}/CHANGELOG.md", f"{url}/issues", f"{url}/tree/{tag}/docs"
        links = {"Repository": url, "Documentation": pages, "Changelog": changes, "Issues": issues}
        return "\n".join([text, "[project.urls]", *(f'{title} = "{link}"' for title, link in links.items()), ""])
    if name == "CITATION.cff":
        return f'{text}repository-code: "{url}"\n'
    text = re.sub(r"(!\[[^\]]*\]\()(?![a-z]+:|#)", rf"\g<1>{url}/raw/{tag}/", text)
    return re.sub(r"(?<=\]\()(?![a-z]+:|#)", f"{url}/blob/{tag}/", text)


def source(url: str | None) -> Path:
    """What the package is built from: the files that git knows, with the address if there is one."""
    folder = FOLDER / "source"
    for name in said("git", "ls-files").splitlines():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if url and name in ("pyproject.toml", "README.md", "CITATION.cff"):
            target.write_text(with_address(name, (ROOT / name).read_text(), url))
        else:
            shutil.copy2(ROOT / name, target)
    return folder


def build(folder: Path) -> tuple[Path, Path]:
    """Build the wheel and the sdist, and check them."""
    tools, dist = FOLDER / "tools", FOLDER / "dist"
    run(sys.executable, "-m", "venv", tools)
    run(tools / "bin/python", "-m", "pip", "install", "-q", *TOOLS)
    run(tools / "bin/python", "-m", "build", "--outdir", dist, folder)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    run(tools / "bin/twine", "check", "--strict", wheel, sdist)
    run(tools / "bin/check-wheel-contents", wheel)
    run(tools / "bin/cffconvert", "--validate", "-i", folder / "CITATION.cff")
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(p.relative_to(folder / "src")) for p in (folder / "src/onchip").rglob("*") if p.is_file()}
    expect(f"the wheel lacks {sorted(sources - in_wheel)}", sources <= in_wheel)
    strangers = {name for name in in_wheel - sources if ".dist-info/" not in name}
    expect(f"the wheel has {sorted(strangers)}, which is no source", not strangers)
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"README.md", "CHANGELOG.md", "constraints.txt", "conftest.py", *(f"tests/{name}" for name in TESTS)}
    expect(f"the sdist lacks {sorted(needed - in_sdist)}", needed <= in_sdist)
    return wheel, sdist


# ---------------------------------------------------------------------------------------------------- in environments


def try_wheel(version: str, python: str, wheel: Path, left_out: set[str]) -> None:
    """Install the wheel into environments with nothing else, with more and more extras, and use what is there."""
    environment = make_environment(version, "bare", python)
    install(environment, wheel)
    frameworks = [("onchip.torch", "torch"), ("onchip.jax", "jax"), ("onchip.integrations.trl", "torch,integrations")]
    run(environment / "bin/python", "-c", NOT_INSTALLED.format(modules=frameworks))
    failed = subprocess.run([environment / "bin/onchip"], capture_output=True, text=True)
    expect(f"onchip says {failed.stderr}", failed.returncode == 1 and "pip install 'onchip[cli]'" in failed.stderr)
    install(environment, wheel, "cli")
    said_version = said(environment / "bin/onchip", "--version")
    expect(f"onchip --version says {said_version!r}", said_version == f"onchip {package_version()}")
    run(environment / "bin/onchip", "info")
    run(environment / "bin/onchip", "plan", "linear_cross_entropy", "--model", "llama3.1-8b", "--tokens", "4096")
    if "torch" not in left_out:
        environment = make_environment(version, "torch", python)
        install(environment, wheel, "torch")
        run(environment / "bin/python", "-c", TORCH)
        install(environment, wheel, "torch", "demo")
        run(environment / "bin/onchip", *SMALL_DEMO, "--out", environment / "demo")
        run(environment / "bin/onchip", "check", *SMALL_CHECK)
        install(environment, wheel, "torch", "integrations")
        run(environment / "bin/python", "-c", TRANSFORMERS)
    if "jax" not in left_out:
        environment = make_environment(version, "jax", python)
        install(environment, wheel, "jax")
        run(environment / "bin/python", "-c", JAX)
        install(environment, wheel, "jax", "demo-jax")
        run(environment / "bin/onchip", *SMALL_DEMO, "--framework", "jax", "--out", environment / "demo")
        run(environment / "bin/onchip", "check", *SMALL_CHECK)


def run_tests(version: str, wheel: Path, sdist: Path, all_tests: bool) -> None:
    """Run the sdist's tests on the installed wheel."""
    environment = FOLDER / version / "torch"
    install(environment, wheel, "torch", "jax", "demo", "demo-jax", "integrations", "dev")
    with tarfile.open(sdist) as archive:
        archive.extractall(FOLDER / version, filter="data")
    folder = FOLDER / version / sdist.name.removesuffix(".tar.gz")
    tests = ("tests", "docs", "README.md") if all_tests else tuple(f"tests/{name}" for name in TESTS)
    options = ("-q", "-o", "pythonpath=tests", "-n", "auto" if all_tests else "0", "--dist", "loadfile")
    run(environment / "bin/python", "-m", "pytest", *options, *tests, cwd=folder, env={"OMP_NUM_THREADS": "1"})


def make_environment(version: str, name: str, python: str) -> Path:
    say(f"Python {version}, environment '{name}'")
    folder = FOLDER / version / name
    run(python, "-m", "venv", folder)
    return folder


def install(environment: Path, wheel: Path, *extras: str) -> None:
    """Install the wheel with these extras; PyTorch's CPU build first, from where pip looks or from PyTorch's own
    index.
    """
    torch = re.search(r"^torch==\S+", CONSTRAINTS.read_text(), re.M)[0]
    if "torch" in extras and not said(environment / "bin/python", "-c", "import torch; print(torch.__version__)"):
        try:
            pip(environment, f"{torch}+cpu")
        except SystemExit:
            pip(FOLDER / "tools", "uv")
            uv = (FOLDER / "tools/bin/uv", "pip", "install", "-q", "--python", environment / "bin/python")
            run(*uv, "--torch-backend", "cpu", torch)
    pip(environment, f"{wheel}[{','.join(extras)}]" if extras else wheel)


# ----------------------------------------------------------------------------------------------------------- commands


def pip(environment: Path, *packages: str | Path) -> None:
    run(environment / "bin/python", "-m", "pip", "install", "-q", "-c", CONSTRAINTS, *packages)


def run(*command: str | Path, cwd: Path = FOLDER.parent, env: dict[str, str] | None = None) -> None:
    """Run a command where no sources lie; if it fails, end with everything that it printed."""
    shown = " ".join(str(word) if "\n" not in str(word) else "'...'" for word in command)
    print(f"$ {shown}", flush=True)
    cwd.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(env or {})}
    done = subprocess.run(command, cwd=cwd, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed: {shown}")


def said(*command: str | Path) -> str:
    """What a command prints; nothing if it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def expect(message: str, true: bool) -> None:
    if not true:
        sys.exit(message)


def say(line: str) -> None:
    print(f"\n{line}", flush=True)


def package_version() -> str:
    return re.search(r'__version__ = "(.+)"', (ROOT / "src/onchip/__init__.py").read_text())[1]


if __name__ == "__main__":
    main()
