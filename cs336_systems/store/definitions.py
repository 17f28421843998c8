"""Python source as definitions: their syntax, alike on every Python, with holes for the definitions that they mention.

`store.code` makes digests of it, and says what counts.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# decorators that leave a definition to those who call it; any other may register it somewhere
_WRAPPERS = {"dataclass", "contextmanager", "cache", "lru_cache", "jit", "builtin", "assume_constant_result"}
_TARGET = re.compile(r"\b([A-Za-z_]\w*(?:\.\w+)+)(?::(\w*))?")  # of a string: a.module, a.module:function
SOURCES = (
    ".cu",
    ".cuh",
)  # a string that is the name of such a file beside the module stands for it
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)  # of such a file
_SILENT = ("ctx", "kind", "returns", "type_comment", "type_ignores")  # fields of syntax that say nothing here
_UNKNOWN = "\0"  # what a string takes from values that only running tells
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_IMPORTS = ast.Import | ast.ImportFrom

Key = tuple[str, str]  # module and name, or instead of a name:
ALL, EFFECTS = "*", ""  # all definitions of the module; its statements that do more than define a name
Names = dict[str, str | None]


@dataclass
class Module:
    """The top-level statements of a source file, by the names that they bind. `imports`: name → dotted path."""

    name: str
    package: str = ""
    path: Path = Path()
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)  # modules from which everything is imported
    effects: list[ast.stmt] = field(default_factory=list)

    @classmethod
    def read(cls, name: str, path: Path) -> Module:
        module = cls(name, name if path.stem == "__init__" else name.rpartition(".")[0], path)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for inner in _of_this_scope([node]):
                if isinstance(inner, _IMPORTS):
                    found = _imported(inner, module.package)
                    module.stars += [path for name, path in found.items() if name == "*"]
                    module.imports |= found
            if isinstance(node, _IMPORTS) or _is_idle(node):
                continue
            names = _bound([node])
            for bound in names:
                module.definitions.setdefault(bound, []).append(node)
            if not names.difference("_") or not _only_defines(node):
                module.effects.append(node)
        return module


class Writer:
    """Writes the syntax of a module's definition, alike on every Python: `out`, and `holes` of it.

    `names` are those of the functions around a node: None, or the dotted path of what was imported under the name.
    """

    def __init__(self, find: Callable[[str], tuple[Key | None, str]], module: Module, own: str) -> None:
        self.find, self.module, self.own = find, module, own
        self.out: list[str] = []
        self.holes: list[Key] = []  # what is mentioned, in order
        self.members: set[ast.AST] = set()  # statements of classes and the names that they bind

    def write(self, node: Any, names: Names) -> None:
        if isinstance(node, list):
            for item in node:
                self.write(item, names)
            self.out.append(";")
        elif not isinstance(node, ast.AST):
            self.out.append(f" {node!a}")
        elif isinstance(node, _IMPORTS) and not names:  # in a branch at the top of the module
            for name in _imported(node, self.module.package):
                self._mention(self.module.imports.get(name, name))
        elif isinstance(node, _IMPORTS) or (_is_idle(node) and node not in self.members):
            pass
        elif isinstance(node, ast.Name):
            self._name(node, node.id, names)
        elif isinstance(node, ast.Attribute) and (path := self._path(node, names)):
            self._mention(path)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self._string(node.value)
        elif isinstance(node, ast.JoinedStr):
            values = [self._value(part, names) for part in node.values]
            self._string("".join(values))
            self.write([p for p, v in zip(node.values, values, strict=True) if v == _UNKNOWN], names)
        elif isinstance(node, ast.AnnAssign) and not self._keeps_annotation(node, node.annotation):
            self.write(ast.Assign(targets=[node.target], value=node.value), names)
        else:
            self._fields(node, names)

    def _fields(self, node: ast.AST, names: Names) -> None:
        inner = names
        if isinstance(node, _FUNCTIONS):
            inner = names | _locals(node, self.module.package)
        elif isinstance(node, _COMPREHENSIONS):
            self.write(node.generators[0].iter, names)
            inner = names | dict.fromkeys(_bound([g.target for g in node.generators]))
        elif isinstance(node, ast.ClassDef):
            for member in (m for m in node.body if not isinstance(m, ast.Expr | ast.Pass)):
                targets = getattr(member, "targets", [getattr(member, "target", member)])
                self.members |= {member, *targets}
        self.out.append(f"({type(node).__name__}")
        for name, value in ast.iter_fields(node):
            if value is None or value == [] or name in _SILENT:  # a field that some Pythons lack is empty
                continue
            if name == "annotation" and not self._keeps_annotation(node, value):
                continue
            self.out.append(f" {name}=")
            if name == "name" and isinstance(node, _DEFINITIONS):
                self._name(node, node.name, names)
            else:
                outside = name in ("args", "decorator_list") and isinstance(node, _FUNCTIONS)
                self.write(value, names if outside else inner)
        self.out.append(")")

    def _keeps_annotation(self, node: ast.AST, annotation: ast.expr) -> bool:
        return node in self.members or "constexpr" in ast.unparse(annotation)

    def _name(self, node: ast.AST, name: str, names: Names) -> None:
        if node in self.members or (name in names and names[name] is None):
            self.out.append(f" {name}")
        elif name in names:
            self._mention(names[name])
        elif name in self.module.definitions:
            self._hole((self.module.name, name))
        elif name in self.module.imports:
            self._mention(self.module.imports[name])
        else:
            self._mention(f"{self.module.name}.{name}" if self.module.stars else name)

    def _path(self, node: ast.expr, names: Names) -> str | None:
        """The dotted path that attributes of something imported spell."""
        if isinstance(node, ast.Attribute):
            base = self._path(node.value, names)
            return base and f"{base}.{node.attr}"
        if not isinstance(node, ast.Name) or node in self.members:
            return None
        if node.id in names or node.id in self.module.definitions:
            return names.get(node.id)
        return self.module.imports.get(node.id)

    def _mention(self, path: str) -> None:
        key, rest = self.find(path)
        if key:
            self._hole(key)
        if rest:
            self.out.append(f" {rest}")

    def _hole(self, key: Key) -> None:
        if key == (self.module.name, self.own):
            self.out.append(" ^")
        else:
            self.out.append(" @")
            self.holes.append(key)

    def _value(self, part: ast.expr, names: Names) -> str:
        """What is known of a part of an f-string: its text, or the name of a module."""
        if isinstance(part, ast.Constant):
            return part.value
        value = part.value
        if isinstance(value, ast.Name) and value.id == "__name__":
            return self.module.name
        if isinstance(value, ast.Attribute) and value.attr == "__name__":
            key, _ = self.find(self._path(value.value, names) or "")
            if key and key[1] == ALL:
                return key[0]
        return _UNKNOWN

    def _string(self, text: str) -> None:
        if isinstance(self.module.definitions.get(text, [None])[0], _DEFINITIONS):
            self.out.append(" '")
            return self._hole((self.module.name, text))
        if text.endswith(SOURCES) and (file := self.module.path.with_name(text)).is_file():
            words = without_comments(file.read_text(encoding="utf-8")).split()
            self.out.append(f" {hashlib.sha256(' '.join(words).encode()).hexdigest()}")
        done = 0
        for match in _TARGET.finditer(text):
            key, _ = self.find(".".join(filter(None, match.groups())))
            if key:
                self.out.append(f" {text[done : match.start()]!a}")
                done = match.end()
                if key != (self.module.name, ALL):  # whose functions are in strings of their own
                    self._hole(key)
        self.out.append(f" {text[done:]!a}")


def without_comments(source: str) -> str:
    """CUDA C++ without its comments."""
    return _COMMENT.sub(" ", source)


def _of_this_scope(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes and all below, without the insides of functions, classes and comprehensions."""
    left = list(nodes)
    while left:
        yield (node := left.pop())
        if not isinstance(node, _DEFINITIONS | ast.Lambda | _COMPREHENSIONS):
            left += ast.iter_child_nodes(node)


def _bound(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that nodes bind in their scope, imports apart."""
    names = set()
    for node in _of_this_scope(nodes):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, _DEFINITIONS | ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            names.add(node.name)
        elif isinstance(node, ast.MatchMapping):
            names.add(node.rest)
    return names - {None}


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> dict[str, str]:
    """Name → dotted path of an import."""
    if isinstance(node, ast.Import):
        return {
            a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
        }
    above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
    base = ".".join([*above, *filter(None, [node.module])])
    return {a.asname or a.name: base if a.name == "*" else f"{base}.{a.name}" for a in node.names}


def _locals(function: ast.AST, package: str) -> Names:
    """The names of a function's scope."""
    arguments = function.args
    given = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    body = function.body if isinstance(function.body, list) else [function.body]
    names: Names = dict.fromkeys([a.arg for a in given if a] + sorted(_bound(body)))
    for node in _of_this_scope(body):
        if isinstance(node, _IMPORTS):
            names |= _imported(node, package)
        elif isinstance(node, ast.Global):
            names = {name: path for name, path in names.items() if name not in node.names}
    return names


def _is_idle(node: ast.AST) -> bool:
    """Whether a statement computes nothing: docstrings, declarations, what is only for type checkers."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING" and not node.orelse
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Pass | ast.Global | ast.Nonlocal) or (
        isinstance(node, ast.AnnAssign) and node.value is None
    )


def _only_defines(node: ast.stmt) -> bool:
    """Whether a statement at the top of a module does nothing but bind names."""
    if isinstance(node, _DEFINITIONS):
        wrapped = [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
        return {name.split(".")[-1] for name in wrapped} <= _WRAPPERS
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and all(
        isinstance(t, ast.Name | ast.Tuple) for t in targets
    )
