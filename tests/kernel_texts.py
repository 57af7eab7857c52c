"""Hashes of what Triton makes from the source of the kernels that calls launch, before any compiler runs.

The text names no places in the source, and its functions are numbered.
"""

import re
from hashlib import sha256
from unittest import mock

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from launched import Recorder
from linear_cross_entropy.ahead_of_time import source_of


def kernels(runs):
    """By kernel, a line for each kind of arguments that these runs launch it with: its constants, and hashes."""
    found, launch_alone = {}, Recorder.launch

    def launch(recorder, launch):
        launch_alone(recorder, launch)
        source = source_of(launch)
        kind = source.signature, source.constants, source.attrs, launch.options
        # Without the names of classes.
        key = launch.kernel.__name__, *(re.sub(r"JITFunction\([\w.]+:|\b[A-Z]\w+\(", "(", str(x)) for x in kind)
        if key not in found:
            found[key] = f"{_constants(launch)} kind {_hash(str(key))} code {_hash(_text(source, launch))}"

    with mock.patch.object(Recorder, "launch", launch):
        for run in runs:
            run()
    names = sorted({key[0] for key in found})
    return {name: sorted(line for key, line in found.items() if key[0] == name) for name in names}


def _constants(launch):
    said = ((p.name, launch.arguments[p.name]) for p in launch.kernel.params if p.is_constexpr)
    return " ".join(f"{name}:{getattr(getattr(x, 'fn', x), '__name__', x)}" for name, x in said)


def _text(source, launch):
    backend, context = make_backend(GPUTarget("cuda", 90, 32)), ir.context()
    options = backend.parse_options(dict(launch.options))
    ir.load_dialects(context)
    backend.load_dialects(context)
    target, words = GPUTarget("cuda", 90, 32), backend.get_codegen_implementation(options)
    text, numbers = source.make_ir(target, options, words, backend.get_module_map(), context).str_nodebug(), {}
    return re.sub(r'@("[^"]*"|[\w.$]+)', lambda x: f"@{numbers.setdefault(x[0], len(numbers))}", text)


def _hash(text):
    return sha256(text.encode()).hexdigest()[:16]
