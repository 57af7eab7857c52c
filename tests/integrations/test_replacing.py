"""How onchip replaces a library's own objects, and restores them."""

import sys
from types import ModuleType

import pytest

from onchip.integrations.replacing import Installed, Ours, Replacing


def theirs(hidden, weight):
    return "theirs"


class Theirs:
    def forward(self, hidden):
        return "theirs"


theirs.__module__ = Theirs.forward.__module__ = "library.home"
OURS = {
    "loss": Ours("library.home", "ours", ("hidden", "weight")),
    "Loss": Ours("library.home", "Ours", ("hidden",), lambda found: getattr(found, "forward", None)),
}


@pytest.fixture
def library(monkeypatch):
    """Its modules: the one that defines what is replaced, and one that has imported some of it by name."""
    for name in ("library", "library.home", "library.user"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    home, user = sys.modules["library.home"], sys.modules["library.user"]
    home.loss, home.Loss, user.loss = theirs, Theirs, theirs
    return Replacing("library", "reinstall library", OURS), home, user


def test_install_and_uninstall(library, monkeypatch):
    replacing, home, user = library
    replacing.uninstall()
    for _ in range(2):
        names = replacing.install("Library 1")
        assert names == ("library.home.loss", "library.user.loss", "library.home.Loss")
        assert (home.loss, user.loss, home.Loss) == ("ours", "ours", "Ours")
    later = ModuleType("library.later")
    later.loss = theirs
    monkeypatch.setitem(sys.modules, "library.later", later)
    assert "library.later.loss" in replacing.install("Library 1")
    assert later.loss == "ours"
    for _ in range(2):
        replacing.uninstall()
        assert (home.loss, user.loss, later.loss, home.Loss) == (theirs, theirs, theirs, Theirs)


def test_the_librarys_own_runs_with_one_warning_for_each_reason(library):
    replacing, *_ = library
    replacing.install("Library 1")
    for reason in ("it rains", "it snows"):
        said = f"onchip.integrations.library: Library's own loss runs, because {reason}"
        with pytest.warns(UserWarning, match=said):
            assert replacing.original("loss", reason, "Library") is theirs
        assert replacing.original("loss", reason, "Library") is theirs  # a warning would be an error


@pytest.mark.parametrize(
    ("name", "found", "message"),
    [
        ("loss", None, "Library 1 has no library.home.loss; reinstall library"),
        ("loss", lambda hidden: 0, "library.home.loss was replaced by .*test_replacing; undo that first"),
        (
            "Loss",
            type("Other", (), {"forward": theirs}),
            r"Loss of Library 1 takes \(hidden, weight\), .*\(hidden\); re",
        ),
        ("Loss", 3, "Library 1 has no library.home.Loss"),
    ],
)
def test_what_is_not_known_is_refused(library, name, found, message):
    replacing, home, user = library
    setattr(home, name, found)
    with pytest.raises(RuntimeError, match=f"^onchip.integrations.library: .*{message}"):
        replacing.install("Library 1")
    assert (getattr(home, name), user.loss) == (found, theirs)


def test_a_module_that_is_not_there(library, monkeypatch):
    replacing, *_ = library
    monkeypatch.delitem(sys.modules, "library.home")
    monkeypatch.setattr(sys.modules["library"], "__path__", [], raising=False)
    with pytest.raises(RuntimeError, match=r"Library 1 has no library\.home\.loss"):
        replacing.install("Library 1")


def test_what_was_done_is_shown_in_lines():
    assert str(Installed("1", ("a.b",), what="Library 1")) == "Library 1 runs through onchip, which replaced\n  a.b"
    shown = str(Installed("1", ("a.b", "a.c"), ("a.Trainer",), what="Library 1"))
    assert shown.splitlines()[1:] == ["  a.b", "  a.c", "for", "  a.Trainer"]
