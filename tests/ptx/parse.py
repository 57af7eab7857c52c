"""Reads PTX: a kernel's registers, parameters and statements."""

import re
from typing import Any, NamedTuple

SPACE, LABEL, TABLE = (re.compile(x) for x in (r"\s*", r"([$\w]+):", r"\s*\.branchtargets([^;]*);"))


class Statement(NamedTuple):
    guard: str | None
    negated: bool
    name: str
    operands: list[Any]  # strings, or lists of them
    text: str


def parse(text):
    """(declared registers, parameters, threads, statements); a label is a string, a table of labels (name, labels)."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"^\s*\.(loc|file|pragma)\b[^\n]*", "", text, flags=re.M)
    signature, _, body = text.partition(".entry")[2].partition(")")
    params = {name: i for i, name in enumerate(re.findall(r"(\w+_param_\d+)", signature))}
    threads = int(re.search(r"\.reqntid\s+(\d+)", body).group(1))
    body = body[body.index("{") + 1 :]
    declared, statements, scopes, count, at = {}, [], [{}], 0, 0
    while True:
        at = SPACE.match(body, at).end()
        if body[at] == "{":
            inner, depth, names = at + 1, 1, set()
            while depth:
                depth += {"{": 1, "}": -1}.get(body[inner], 0)
                inner += 1
            names |= set(re.findall(r"(?:^|[;{])\s*(\w+):", body[at:inner]))
            count += 1
            scopes.append({name: f"{name}#{count}" for name in names})
            at += 1
            continue
        if body[at] == "}":
            scopes.pop()
            at += 1
            if not scopes:
                break
            continue
        label = LABEL.match(body, at)
        if label:
            at = label.end()
            table = TABLE.match(body, at)
            if table:
                at = table.end()
                statements.append((label.group(1), [x.strip() for x in table.group(1).split(",")]))
            else:
                statements.append(scopes[-1].get(label.group(1), label.group(1)))
            continue
        end = body.index(";", at)
        line = " ".join(body[at:end].split())
        at = end + 1
        if line.startswith(".reg"):
            _, kind, names = line.split(None, 2)
            for name in names.split(","):
                name, _, several = name.strip().partition("<")
                if several:
                    for i in range(int(several.rstrip(">"))):
                        declared[f"{name}{i}"] = kind[1:]
                else:
                    scopes[-1][name] = f"{name}#{count}"
                    declared[f"{name}#{count}"] = kind[1:]
            continue
        if line.startswith("."):
            continue
        statements.append(_statement(line, scopes))
    return declared, params, threads, statements


def _statement(line, scopes):
    guard = re.match(r"@(!?)([\w%]+)\s+(.*)", line) if line[0] == "@" else None
    rest = guard.group(3) if guard else line
    name, _, operands = rest.partition(" ")
    renamed = {k: v for scope in scopes for k, v in scope.items()}

    def rename(word):
        if not renamed:
            return word
        return re.sub(r"(?<![\w%$.])[A-Za-z_]\w*", lambda m: renamed.get(m.group(0), m.group(0)), word)

    # At commas that aren't inside of braces or brackets; these may hold others.
    parts, depth = [], 0
    for part in operands.split(",") if operands.strip() else []:
        if depth:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
        depth += part.count("{") + part.count("[") - part.count("}") - part.count("]")
    parts = [x.strip() for x in parts if x.strip()]
    made = [[rename(x.strip()) for x in p[1:-1].split(",")] if p.startswith("{") else rename(p) for p in parts]
    return Statement(rename(guard.group(2)) if guard else None, bool(guard and guard.group(1)), name, made, line)
