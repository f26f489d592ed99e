"""Translates the Go code of a design document into Python, line by line, so that the translation is literal.

Knows the constructs that the document uses. Names become snake case; an accessor becomes an attribute; what takes a
`context.Context` first is awaited; `defer` becomes `finally`; an error is returned, as in Go. The constants and types
keep their names. Whatever is not known here stays Go, which Python does not compile.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

FUNCTION = re.compile(r"^func (?:\((\w+) [^)]*\) )?(\w+)\((.*?)\)[^\n]*\{\n(.*?)^\}$", re.MULTILINE | re.DOTALL)
METHOD = re.compile(r"^func \(\w+ \*?(\w+)[^)]*\) (\w+)\(([^)]*)\)", re.MULTILINE)
TYPE = re.compile(r"^type (\w+)(?:\[[^\n]*?\])? (?:struct|interface) ?\{(?:\}|\n(.*?)^\})$", re.MULTILINE | re.DOTALL)
CONSTANT = re.compile(r"^ *\w+ +(\w+) += \"(\w+)\"$", re.MULTILINE)
_MEMBER = re.compile(r"^ {4}(\w+)(?:\(([^()]*)\))?", re.MULTILINE)
_WORD = re.compile(r"(?<![\w\"])([A-Za-z]\w*)(?![\w\"])")


Members = dict[str, tuple[str, ...]]
"""The fields of a type, and its methods with their parameters, by name."""


def snake(name: str) -> str:
    """The name in snake case: `execCtx` is `exec_ctx`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def declarations(text: str) -> dict[str, Members]:
    """The structs, interfaces and methods that the text declares, by type; a type that a struct embeds is a field."""
    text = re.sub(r" *//[^\n]*", "", text)
    found: dict[str, Members] = {}
    for name, body in TYPE.findall(text):
        found[name] = {member: _parameters(given) for member, given in _MEMBER.findall(body)}
    for name, method, given in METHOD.findall(text):
        found.setdefault(name, {})[method] = _parameters(given)
    return found


def translated(text: str, *, accessors: Collection[str], names: Mapping[str, str]) -> str:
    """The functions and methods of the text as Python functions, a receiver as their first parameter.

    `accessors` are methods that are attributes in Python; `names` are the names that differ in more than their case.
    """
    return "\n".join(_function(*found, accessors, names) for found in FUNCTION.findall(text))


def _function(
    receiver: str, name: str, parameters: str, body: str, accessors: Collection[str], names: Mapping[str, str]
) -> str:
    taken = [snake(one) for one in _parameters(parameters)]
    kind = "async def" if taken[:1] == ["ctx"] else "def"
    lines = [f"{kind} {snake(name)}({', '.join([receiver, *taken] if receiver else taken)}):"]
    deferred: list[str] = []
    for line in body.splitlines():
        if line.strip() == "}":
            continue  # the indentation ends the block
        code, slashes, comment = line.partition("//")
        python = code if code.isspace() else _code(code, accessors, names)
        indent = "    " * len(deferred)
        if python.strip().startswith("defer "):
            lines.append(f"{indent}    try:")
            deferred.append(python.strip().removeprefix("defer "))
        else:
            spaces = "" if code.isspace() or not code else "  "
            lines.append((indent + python + (f"{spaces}# {comment.strip()}" if slashes else "")).rstrip())
    for depth in range(len(deferred), 0, -1):
        indent = "    " * depth
        lines += [f"{indent}finally:", f"{indent}    {deferred[depth - 1]}"]
    return "\n".join(lines) + "\n"


def _code(code: str, accessors: Collection[str], names: Mapping[str, str]) -> str:
    """One line without its comment."""
    code = re.sub(r"\bif (\w+) := ", r"if (\1 := ", code)
    code = re.sub(r"; (\w+) != nil \{$", r") is not None:", code.rstrip()) if "; " in code else code.rstrip()
    code = re.sub(r"^( *)for \{$", r"\1while True:", code)
    code = re.sub(r"^( *(?:if|for) .*) \{$", r"\1:", code)
    code = re.sub(r"!= nil\b", "is not None", code)
    code = re.sub(r"\bnil\b", "None", code)
    code = re.sub(r"^( *[\w, ]+) := ", r"\1 = ", code)
    code = re.sub(r"(?<=[({ ])(\w+): +", r"\1=", code)
    code = re.sub(r"([\w.]+)\(ctx, ", r"await \1(ctx, ", code)
    code = re.sub(rf"\.({'|'.join(accessors)})\(\)", r".\1", code)
    code = re.sub(r"&?\b(\w+)\{", r"\1(", code).replace("}", ")")
    return _WORD.sub(lambda found: _name(found, code, names), code)


def _name(found: re.Match[str], code: str, names: Mapping[str, str]) -> str:
    word = found[1]
    if word in names:
        return names[word]
    after, before = code[found.end() :][:1], code[: found.start()][-1:]
    is_exported = word[0].isupper() and before != "." and after != "="
    is_type_or_constant = is_exported and not (after == "(" and word.startswith("New"))
    return word if is_type_or_constant else snake(word)


def _parameters(given: str) -> tuple[str, ...]:
    return tuple(one.split()[0] for one in given.split(",") if one.strip())
