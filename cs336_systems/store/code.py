"""The digest of the code that a row was measured with: of the definitions that its numbers depend on.

    code_digest(chapters.load("hardware"), case)        # "1f0c94ab"

From `run_group`, `GROUP` and `Case` of an experiment every function, class and module-level constant of this package is
followed that the ones before mention, in whatever module it stands: by name, as an attribute of a module, imported
while running, or as "module:function" in a string, for another process. Nothing is imported or run for that, and no
git is asked. What stands in a digest is what was reached, as syntax: a definition that moves to another file or is
called otherwise, its imports, formatting, comments, docstrings and annotations make no difference. (Annotations in a
class body do, which are fields of dataclasses, and those as `constexpr`.)

With any definition of a module come its statements that do more than define a name (`register(...)`, `TABLE[1] = 2`).
A string that is the name of a function or class of its module counts as mentioning it; one that is the name of a CUDA
source beside its module counts as that file, without comments. What is mentioned by other means, names put together
while running or an import for its effect alone, is not seen.

What starts processes and keeps rows (AROUND) does none of the work that is timed: following stops there.

Where an experiment chooses between implementations, it mentions all of them, a row depends on one. Its `PER_CASE` names
modules at which following stops, `also_measures(case)` where it goes on for a case: each "module" for all its
definitions, "package.*" for those of all its modules, or "module:definition".
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from cs336_systems.store.definitions import ALL, EFFECTS, SOURCES, Key, Module, Writer

PACKAGE = Path(__file__).resolve().parents[1]
ROOTS = ("run_group", "GROUP", "Case")
AROUND = ("store", "launch")  # folders of the package
_ROUNDS = 4  # so deep a definition's own digest looks into those that it mentions; all that are reached count


@dataclass
class Definition:
    """What a digest takes from a definition: its syntax, with holes for what it mentions (`holes`, in order)."""

    syntax: str = ""
    holes: list[Key] = field(default_factory=list)
    also: set[Key] = field(default_factory=set)  # what counts as well, without a place in the syntax


class Sources:
    """The modules of a package, each read once. `extra`: others that count as its own, by name."""

    def __init__(self, package: Path, extra: dict[str, Path]) -> None:
        self.package, self.extra = package, extra
        self.module = functools.cache(self._module)
        self.definition = functools.cache(self._definition)

    def _module(self, name: str) -> Module | None:
        """The module of a dotted name; None where there is none in this package."""
        base = self.package.parent.joinpath(*name.split("."))
        if name in self.extra:
            return Module.read(name, self.extra[name])
        if name.split(".")[0] == self.package.name:
            for path in (base / "__init__.py", base.with_name(f"{base.name}.py")):
                if path.is_file():
                    return Module.read(name, path)
            return Module(name) if base.is_dir() else None
        return None

    def find(self, path: str) -> tuple[Key | None, str]:
        """What a dotted path names: a definition, or all those of a module, and the rest of the path. None, path: it
        is not of this package."""
        parts = path.split(".")
        if self.module(parts[0]) is None:
            return None, path
        count = 1
        while count < len(parts) and self.module(".".join(parts[: count + 1])):
            count += 1
        module, rest = self.module(".".join(parts[:count])), parts[count:]
        if not rest:
            return (module.name, ALL), ""
        if rest[0] in module.definitions:
            return (module.name, rest[0]), ".".join(rest[1:])
        targets = [module.imports.get(rest[0]), *(f"{star}.{rest[0]}" for star in module.stars)]
        for target in filter(None, targets):
            found = self.find(".".join([target, *rest[1:]]))
            if found[0] or target == targets[0]:
                return found
        return None, ".".join(rest)

    def named(self, text: str) -> list[Key]:
        """The definitions that "module" or "module:definition" names; ValueError where there is no such thing."""
        name, _, definition = text.partition(":")
        if name.endswith(".*"):
            folder = self.package.parent.joinpath(*name.split(".")[:-1])
            files = (f.relative_to(self.package.parent).with_suffix("") for f in folder.rglob("*.py"))
            modules = sorted(".".join(f.parts).removesuffix(".__init__") for f in files)
            return [key for module in modules for key in self.named(module)]
        module = self.module(name)
        if module is None:
            raise ValueError(f"no source for module {name!r} in {self.package}")
        if definition and definition not in module.definitions:
            raise ValueError(f"module {name!r} does not define {definition!r}")
        return [(name, d) for d in ([definition] if definition else (*module.definitions, EFFECTS))]

    def _definition(self, key: Key) -> Definition:
        module, name = self.module(key[0]), key[1]
        if name == ALL:
            return Definition(also=set(self.named(key[0])))
        writer = Writer(self.find, module, name)
        for node in module.effects if name == EFFECTS else module.definitions[name]:
            writer.write(node, {})
        return Definition("".join(writer.out), writer.holes, {(module.name, EFFECTS)} - {key})

    def digest(self, roots: set[Key], stops: set[Key]) -> str:
        """Eight hexadecimal digits of all definitions that `roots` reach, without those at which following stops."""
        around = tuple(f"{self.package.name}.{folder}." for folder in AROUND)
        reached: dict[Key, Definition] = {}
        left = list(roots)
        while left:
            if (key := left.pop()) not in reached:
                reached[key] = found = self.definition(key)
                left += [
                    k for k in (*found.holes, *found.also) if k not in stops and not k[0].startswith(around)
                ]
        now = first = {key: _digest(found.syntax.encode()) for key, found in reached.items()}

        def one(key: Key) -> bytes:
            """The digest of a definition with those that it mentions, as they are now, in its holes."""
            if key[1] == ALL:
                return _digest(*sorted(now.get(k, b"") for k in reached[key].also))
            return _digest(first[key], *(now.get(k, b"") for k in reached[key].holes))

        for _ in range(_ROUNDS):  # since definitions may mention each other
            now = {key: one(key) for key in reached}
        return _digest(*sorted({now[key] for key, found in reached.items() if found.syntax})).hex()[:8]


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).digest()


def code_digest(experiment: ModuleType, case: Any = None) -> str:
    """Eight hexadecimal digits of the definitions that the numbers of a case depend on. Which cases there are makes no
    difference; which one it is does where the experiment has `also_measures`."""
    return code_digests(experiment)(case)


def code_digests(experiment: ModuleType, package: Path = PACKAGE) -> Callable[[Any], str]:
    """`code_digest` of an experiment's cases, by the sources as they are now.

    ValueError for a name in `also_measures` or `PER_CASE` that nothing has.
    """
    files = {file for kind in (".py", *SOURCES) for file in package.rglob(f"*{kind}")}
    own = Path(experiment.__file__)
    extra = () if own in files else ((experiment.__name__, own),)
    stamps = tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in sorted({*files, own}))
    sources = _sources(package, extra, stamps)
    also = getattr(experiment, "also_measures", lambda case: ())

    @functools.cache
    def of_names(names: tuple[str, ...]) -> str:
        return sources_digest(experiment, sources, names)

    return lambda case: of_names(tuple(also(case)))


def sources_digest(experiment: ModuleType, sources: Sources, names: tuple[str, ...]) -> str:
    """The digest of an experiment's cases for which `also_measures` gives these names."""
    stops = {key for name in getattr(experiment, "PER_CASE", ()) for key in sources.named(name)}
    more = {key for name in names for key in sources.named(name)}
    found = [sources.find(f"{experiment.__name__}.{name}")[0] for name in ROOTS]
    return sources.digest({*filter(None, found), *more}, stops - more)


@functools.lru_cache(maxsize=1)
def _sources(package: Path, extra: tuple[tuple[str, Path], ...], stamps: tuple[Any, ...]) -> Sources:
    return Sources(package, dict(extra))
