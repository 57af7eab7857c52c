"""What users of the package meet: its metadata, and the messages when a dependency is missing."""

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import onchip

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def without(package, code):
    """Run code where a package is not installed."""
    hidden = f"import sys; sys.modules[{package!r}] = None; {code}"
    return subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)


def test_a_name_of_the_public_api_is_told_where_it_is():
    with pytest.raises(ImportError, match=r"onchip: linear_jsd is imported from onchip\.torch or onchip\.jax"):
        from onchip import linear_jsd  # noqa: F401
    with pytest.raises(ImportError, match=r"onchip: LMHead is imported from onchip\.torch"):
        onchip.LMHead  # noqa: B018
    assert not hasattr(onchip, "soft_cap")


@pytest.mark.parametrize(
    ("module", "package", "extras"),
    [
        ("onchip.torch", "torch", "torch"),
        ("onchip.jax", "jax", "jax"),
        ("onchip.integrations.transformers", "torch", "torch,integrations"),
        ("onchip.integrations.trl", "torch", "torch,integrations"),
        ("onchip.integrations.flax", "jax", "jax,integrations"),
        ("onchip.integrations.flax", "flax", "jax,integrations"),
        ("onchip.integrations.levanter", "jax", "jax"),
        ("onchip.integrations.maxtext", "flax", "jax,integrations"),
    ],
)
def test_a_missing_framework_is_named_with_its_extra(module, package, extras):
    said = without(package, f"import {module}").stderr.splitlines()[-1]
    expected = f"{module} needs {package}, which is not installed; pip install 'onchip[{extras}]'"
    assert said == f"ModuleNotFoundError: {expected}"


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_the_command_names_its_extra(package):
    done = without(package, "from onchip.__main__ import main; main()")
    needed = f"the command line needs {package}, which is not installed; pip install 'onchip[cli]'"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"onchip: {needed}\n")


def test_python_m_is_the_command():
    done = subprocess.run([sys.executable, "-m", "onchip", "--help"], capture_output=True, text=True, check=True)
    assert "Usage: onchip " in done.stdout
    assert PROJECT["scripts"] == {"onchip": "onchip.__main__:main"}


def test_the_library_needs_no_command_line():
    assert {re.split(r"[<>=]", needed)[0] for needed in PROJECT["dependencies"]} == {"msgspec", "numpy"}


def test_every_extra_that_is_named_exists():
    sources = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = {
        name
        for path in sources
        for found in re.findall(r"onchip\[([a-z,-]+)\]", path.read_text())
        for name in found.split(",")
    }
    assert {"torch", "jax", "cli"} <= named <= PROJECT["optional-dependencies"].keys()


def test_links_of_the_readme_lead_somewhere():
    readme = (ROOT / "README.md").read_text()
    relative = [link.split("#")[0] for link in re.findall(r"\]\((?!https?:|#)([^)]+)\)", readme)]
    assert relative
    assert [link for link in relative if not (ROOT / link).exists()] == []


def test_examples_of_the_readme_run_alone(capsys):
    """Whoever copies one hasn't run those before it."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, {})
        assert all(len(line) <= 80 for line in block.splitlines())
    comment = blocks[0].splitlines()[-1]
    assert capsys.readouterr().out.startswith(comment.removeprefix("# ") + "\n")


def test_addresses_are_filled_in_where_the_package_is_built():
    """The sources name none, since nobody owns one yet; the package index needs whole links."""
    release = runpy.run_path(str(ROOT / "tools" / "release.py"))
    url = "https://example.org/us/onchip"
    text = {name: (ROOT / name).read_text() for name in ("pyproject.toml", "README.md", "CITATION.cff")}
    made = {name: release["with_address"](name, before, url) for name, before in text.items()}
    assert "urls" not in PROJECT
    assert all(link.startswith(url) for link in tomllib.loads(made["pyproject.toml"])["project"]["urls"].values())
    assert f'repository-code: "{url}"' in made["CITATION.cff"]
    assert not re.findall(r"\]\((?!https?:|#)", made["README.md"])
    assert f"]({url}/raw/v{onchip.__version__}/docs/images/" in made["README.md"]
    code = re.compile(r"^```.*?^```", re.M | re.S)
    assert code.findall(made["README.md"]) == code.findall(text["README.md"])


def test_no_address_is_invented():
    """Of a repository of ours, in what a user reads."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.cff"), *(ROOT / "docs").rglob("*.md")]
    found = {link for page in pages for link in re.findall(r"https?://[^\s)\"'>]*onchip[^\s)\"'>]*", page.read_text())}
    assert found == set()


def test_one_version():
    assert f'version: "{onchip.__version__}"\n' in (ROOT / "CITATION.cff").read_text()
    assert f"## {onchip.__version__}" in (ROOT / "CHANGELOG.md").read_text()
