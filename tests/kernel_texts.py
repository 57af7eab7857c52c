"""Hashes of what Triton makes from the source of the kernels that calls launch, before any compiler runs.

The text names no places in the source, and its functions are numbered.
"""

import re
from hashlib import sha256

from triton._C.libtriton import ir
from triton.compiler.compiler import make_backend

from compiled import kinds


def kernels(runs):
    """By kernel, a line for each kind of arguments that these runs launch it with: its constants, and hashes."""
    found = {}
    for key, launch in kinds(runs).items():
        line = f"{_constants(launch)} kind {_hash(str(key))} code {_hash(_text(launch))}"
        found.setdefault(key[0], []).append(line)
    return {name: sorted(found[name]) for name in sorted(found)}


def _constants(launch):
    said = ((p.name, launch.arguments[p.name]) for p in launch.kernel.params if p.is_constexpr)
    return " ".join(f"{name}:{getattr(getattr(x, 'fn', x), '__name__', x)}" for name, x in said)


def _text(launch):
    job, context = launch.job(90), ir.context()
    backend = make_backend(job.target)
    options = backend.parse_options(dict(job.options))
    ir.load_dialects(context)
    backend.load_dialects(context)
    words, numbers = backend.get_codegen_implementation(options), {}
    made = job.source.make_ir(job.target, options, words, backend.get_module_map(), context)
    return re.sub(r'@("[^"]*"|[\w.$]+)', lambda x: f"@{numbers.setdefault(x[0], len(numbers))}", made.str_nodebug())


def _hash(text):
    return sha256(text.encode()).hexdigest()[:16]
