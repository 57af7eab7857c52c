"""Reads PTX: a kernel's registers, parameters and statements."""

import re
from typing import Any, NamedTuple


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
        at = re.compile(r"\s*").match(body, at).end()
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
        label = re.compile(r"([$\w]+):").match(body, at)
        if label:
            at = label.end()
            table = re.compile(r"\s*\.branchtargets([^;]*);").match(body, at)
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
    guard = re.match(r"@(!?)([\w%]+)\s+(.*)", line)
    rest = guard.group(3) if guard else line
    name, _, operands = rest.partition(" ")
    renamed = {k: v for scope in scopes for k, v in scope.items()}

    def rename(word):
        return re.sub(r"(?<![\w%$.])[A-Za-z_]\w*", lambda m: renamed.get(m.group(0), m.group(0)), word)

    parts, depth, word = [], 0, ""
    for c in operands:
        if c == "," and depth == 0:
            parts.append(word.strip())
            word = ""
            continue
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(c, 0)
        word += c
    if word.strip():
        parts.append(word.strip())
    made = [[rename(x.strip()) for x in p[1:-1].split(",")] if p.startswith("{") else rename(p) for p in parts]
    return Statement(rename(guard.group(2)) if guard else None, bool(guard and guard.group(1)), name, made, line)
