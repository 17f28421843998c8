"""What README, TRAINING and CONTRIBUTING say works: commands, and an example of code."""

from __future__ import annotations

import re
import shlex
import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import typer  # noqa: E402

from cs336_systems.attention import attention, registry  # noqa: E402
from cs336_systems.cli import train  # noqa: E402
from cs336_systems.cli.main import app  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
START = re.compile(r"^(?:torchrun .*-m cs336_systems |cs336 )(?=\S)")


def named():
    found = set()
    for page in ("README.md", "TRAINING.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        lines = [
            line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()
        ]
        quoted = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        for words in (*lines, *quoted):
            for part in (
                shlex.join(shlex.split(words, comments=True)).split(" '&&' ") if START.match(words) else ()
            ):
                found.add(START.sub("", part.strip()))
    return sorted(found - {"bench", "results merge"})  # which are spoken of


def leaves(command):
    for inner in getattr(command, "commands", {}).values():
        yield from leaves(inner)
    if not hasattr(command, "commands"):
        yield command


@pytest.mark.parametrize("words", named())
def test_commands_of_the_documents_are_taken(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").mkdir()
    command, given = typer.main.get_command(app), []
    for leaf in leaves(command):
        leaf.callback = lambda **told: given.append(told)
    command.main(shlex.split(words), standalone_mode=False)
    assert len(given) == 1
    flags = {name: given[0][name] for name in train.FLAGS if given[0].get(name) is not None}
    if "change" in given[0]:  # of the training system, whose keys are checked, too
        train._config(None, given[0]["change"], flags)


def test_many_are_named():
    assert len(named()) > 50 and any(words.startswith("bench matrix --d-model") for words in named())


def test_the_example_of_an_implementation_of_attention_is_one(monkeypatch):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    text = text.partition("\n## An implementation of attention\n")[2]
    module, function, entry, _ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    room, registered = types.ModuleType("cs336_systems.attention.by_rows"), vars(registry).copy()
    exec(module, vars(room))
    monkeypatch.setitem(sys.modules, room.__name__, room)
    exec(f"{function}\nmade = {{{entry}}}", registered)
    [(name, made)] = registered["made"].items()
    registry.check_machine()
    monkeypatch.setitem(registry.IMPLEMENTATIONS, name, made)
    monkeypatch.setitem(registry._usable, name, True)
    q, k, v = torch.randn(3, 2, 5, 7, 16)
    for is_causal in (False, True):
        expected = attention(q, k, v, is_causal, "reference")
        torch.testing.assert_close(attention(q, k, v, is_causal, name), expected)
    with pytest.raises(ValueError, match=f"{name} does not serve sliding window"):
        attention(q, k, v, True, name, window=2)
