"""Finds compiled kernels in Triton's cache by a key that is soon made.

Triton's own key begins with a hash of all of its files, half a gigabyte, and for it the functions that a kernel calls
are parsed.  So the cache has, under a key of ours, the key that Triton gave to a kernel.  Ours is made of all that
Triton's is made of: sources, globals, signature, constants, options, target and environment.  Only of Triton's own
files it has sizes and times, as Python tells by these whether it compiled a source before.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import sha256
from inspect import getclosurevars, signature, unwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from onchip.kernels.triton.keys import names_of, settle

_FILE = "onchip.txt"
# Parts of Triton that decide what is compiled, and variables that name another assembler than Triton's.
_PARTS = "_C", "backends", "compiler", "experimental", "language", "runtime", "tools"
_TOOLS = "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"
_VERSION = "TRITON_MOCK_PTX_VERSION"
# What Triton passes to the function that is replaced here.
_PASSED = ["key", "signature", "device", "constexprs", "options", "attrs", "warmup"]


Seen = dict[int, tuple[Any, str]]
"""Functions by their ids, with hashes of their sources."""


class Nameless(Exception):
    """Raised for what no key can be made of."""


def recall(kernel: Any) -> None:
    """Have the variants of a kernel looked up by our key before Triton makes its own."""
    compile_it = getattr(kernel, "_do_compile", None)  # other versions of Triton may have another
    if compile_it is not None and "_do_compile" not in vars(kernel) and [*signature(compile_it).parameters] == _PASSED:
        kernel._do_compile = partial(_compile, kernel, compile_it)


def _compile(kernel: Any, compile_it: Any, *passed: Any) -> Any:
    from triton.runtime._async_compile import active_mode  # type: ignore[import-untyped]

    of = dict(zip(_PASSED, passed, strict=True))
    kernels, _, target, *_ = kernel.device_caches[of["device"]]
    source = kernel.ASTSource(kernel, of["signature"], of["constexprs"], of["attrs"])
    key, made = find(source, target, of["options"])
    if made is not None:
        kernels[of["key"]] = made
        told = getattr(active_mode.get(), "loaded", None)  # as of compiling.py
        if told is not None:
            told[key] = source.name
        return made
    settle(kernel)
    made = compile_it(*passed)
    note(key, made)
    return made


def find(source: Any, target: Any, options: Any) -> tuple[str | None, Any]:
    """Our key, and the kernel that Triton would compile from this; None for what isn't there."""
    from triton.compiler.compiler import CompiledKernel  # type: ignore[import-untyped]
    from triton.runtime.cache import get_cache_manager  # type: ignore[import-untyped]

    key: str | None = None
    seen: Seen = {}
    with suppress(Exception):  # what has no key or differs, Triton's way is right for
        if _is_watched():
            return None, None
        key = _key(source, target, options, seen)
        if (path := get_cache_manager(key).get_file(_FILE)) is not None:
            theirs, file = Path(path).read_text(), f"{source.name[:150]}.json"
            files = get_cache_manager(theirs).get_group(file) or {}
            if file in files and any(x.endswith(".cubin") for x in files):
                return key, CompiledKernel(source, files, theirs)
    return (None if key is None or not _are_new(seen) else key), None


def note(key: str | None, made: Any) -> None:
    """Note under our key what Triton found or compiled."""
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.cache import get_cache_manager

    if key is not None and isinstance(made, CompiledKernel):
        with suppress(Exception):  # a cache that can only be read
            for x in (key, _hashed(_installed())):
                get_cache_manager(x).put(made.hash, _FILE, binary=False)


def _are_new(seen: Seen) -> bool:
    """Whether Triton's hash of each of these functions, which it makes once, is of what the function is now.

    Otherwise a global was changed since.  What Triton finds is then of the global as it was.
    """
    fresh = True
    for function, source in seen.values():
        if function.hash is None:  # Triton will make it now
            function._hashed_as = source
        fresh = fresh and getattr(function, "_hashed_as", None) == source
    return fresh


def noted_any() -> bool:
    """Whether the cache has something of this Triton's."""
    from triton.runtime.cache import get_cache_manager

    with suppress(Exception):
        return get_cache_manager(_hashed(_installed())).get_file(_FILE) is not None
    return False


def _is_watched() -> bool:
    """Whether Triton was asked to compile each kernel, or to tell about it."""
    from triton import knobs  # type: ignore[import-untyped]

    runtime, compilation = knobs.runtime, knobs.compilation
    hooks = runtime.jit_cache_hook, runtime.jit_post_compile_hook, runtime.add_stages_inspection_hook
    asked = compilation.override, compilation.dump_ir, compilation.always_compile, compilation.use_ir_loc
    return any((*hooks, *asked, compilation.listener, compilation.instrumentation_mode))


# --------------------------------------------------------------------------------------------------------------- keys


def _key(source: Any, target: Any, options: Any, seen: Seen) -> str:
    """Our key; adds the functions that are called to `seen`."""
    from triton._C.libtriton import get_cache_invalidating_env_vars  # type: ignore[import-untyped]

    constants = [(k, type(x).__name__, _value(x, seen)) for k, x in sorted(source.constants.items())]
    kind, environment = type(source).__name__, sorted(get_cache_invalidating_env_vars().items())
    of = _value(source.fn, seen), source.name, kind, [*source.signature.items()], constants, _plain(source.attrs)
    return _hashed((*of, options.hash(), str(target), environment, _installed(), _tools()))


@lru_cache(maxsize=1)
def _installed() -> str:
    """Triton's version, and sizes and times of its files."""
    import triton

    root = Path(triton.__file__).parent
    walked = [found for part in _PARTS for found in os.walk(root / part, followlinks=True)]
    files = [os.path.join(folder, x) for folder, _, names in walked for x in names if not x.endswith((".pyc", ".h"))]
    return _hashed((triton.__version__, [_state(x) for x in sorted(files)]))


def _tools() -> list[str]:
    """The assembler, where another one than Triton's was chosen."""
    from triton import knobs

    paths = [x for name in _TOOLS if (x := os.environ.get(name)) and os.path.exists(x)]
    return [os.environ.get(_VERSION, ""), *map(_state, paths), *[_plain(x) for x in sorted(vars(knobs.nvidia).items())]]


def _state(path: str) -> str:
    found = os.stat(path)
    return f"{path} {found.st_size} {found.st_mtime_ns}"


def _hashed(x: Any) -> str:
    return sha256(repr(x).encode()).hexdigest()


def hash_source(function: Any, seen: Seen) -> str:
    """A hash of a function's source, and of the values of all that it names."""
    if (known := seen.get(id(function))) is not None:
        return known[1]
    seen[id(function)] = function, function.__qualname__  # it may call itself
    named = [(name, _value(x, seen)) for name, x in _named(function)]
    text = type(function).__name__, function.raw_src, function.src, function.starting_line_number
    made = _hashed((*text, getattr(function, "noinline", None), named))
    seen[id(function)] = function, made
    return made


def _named(function: Any) -> Iterator[tuple[str, Any]]:
    """The globals that a function names, what it names of modules and classes, and its parameters' defaults."""
    code, scope = function.fn.__code__, function.fn.__globals__
    if code.co_freevars:
        scope = scope | getclosurevars(function.fn).nonlocals
    names = sorted(names_of(code))
    for name in names:
        yield from _reached(name, scope.get(name), names, ())
    yield from (("default", x) for x in function.fn.__defaults__ or ())
    yield from sorted((function.fn.__kwdefaults__ or {}).items())


def _reached(path: str, x: Any, names: Sequence[str], within: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """What has this path, unless it is a module, and what it has of these names, where it is a module or a class."""
    from triton.language import constexpr  # type: ignore[import-untyped]
    from triton.runtime.jit import JITCallable  # type: ignore[import-untyped]

    is_module = isinstance(x, ModuleType)
    if x is None or (is_module and _is_of_triton(x.__name__)) or any(x is y for y in within):
        return
    if not is_module:
        yield path, x
    if is_module or (isinstance(x, type) and not _is_of_triton(x.__module__)):
        for name in names:
            found = getattr(x, name, None)
            if is_module or isinstance(found, JITCallable | constexpr | type):  # no method, which no kernel can call
                yield from _reached(f"{path}.{name}", found, names, (*within, x))


def _is_of_triton(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "triton"


def _value(x: Any, seen: Seen) -> str:
    from triton.language import constexpr
    from triton.runtime.jit import JITCallable

    if isinstance(x, tuple):
        return f"{type(x).__name__}{getattr(x, '_fields', '')}({', '.join(_value(y, seen) for y in x)})"
    if isinstance(x, constexpr):
        return f"constexpr {type(x.value).__name__} {_value(x.value, seen)}"
    if isinstance(x, JITCallable):
        return x.__qualname__ if _is_of_triton(x.__module__) else hash_source(x, seen)
    if getattr(x, "__triton_aggregate__", False):
        fields = [(name, _plain(kind)) for name, kind in getattr(x, "__annotations__", {}).items()]
        return f"{x.__qualname__} {fields} {[_value(y, seen) for y in x.hash_attrs]}"
    if getattr(x, "__triton_builtin__", False) and not _is_of_triton(x.__module__):
        code = unwrap(x).__code__
        return _plain((x.__qualname__, code.co_code, code.co_names, code.co_consts))
    if isinstance(x, type) or (callable(x) and _is_of_triton(getattr(x, "__module__", None))):
        return f"{x.__module__}.{getattr(x, '__qualname__', type(x))} {getattr(x, '_fields', '')}"
    return _plain(x)


def _plain(x: Any) -> str:
    made = repr(x)
    if " at 0x" in made or "JITFunction(" in made:
        raise Nameless
    return made
