"""Interrupts: one line and an exit code, also where the exception is dropped on its way."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cs336_systems.cli import terminal
from cs336_systems.cli.terminal import Interruptible

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


def test_an_interrupt_while_the_command_is_imported_is_told_in_a_line():
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from cs336_systems.__main__ import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'typer': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder()); main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(terminal.__file__).resolve().parents[1])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "Interrupted\n")


class Finalizer:
    def __init__(self, number):
        self.number = number

    def __del__(self):
        signal.raise_signal(self.number)


def dropped_by_a_finalizer(number):
    Finalizer(number)


def dropped_by_a_library(number):
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(number)


def made_into_another_error(number):
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt:
        raise SystemError("a C function returned a result with an exception set") from None


def cleaned_up_for_long(number):
    try:
        signal.raise_signal(number)
    finally:
        time.sleep(1.5)  # not interrupted once more
        CLEANED.append(number)


def while_torch_is_imported(number):
    """Where an exception would end the process: the import goes on."""
    module = {"__name__": "torch.part", "CLEANED": CLEANED}
    exec(f"import signal; signal.raise_signal({number}); CLEANED.append({number})", module)


CLEANED = []
HOW = [
    dropped_by_a_finalizer, dropped_by_a_library, made_into_another_error, cleaned_up_for_long, while_torch_is_imported,
]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("how", HOW, ids=lambda how: how.__name__)
def test_no_interrupt_is_lost(how, number, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    CLEANED.clear()
    app = typer.Typer(cls=Interruptible, no_args_is_help=True)

    @app.callback()
    def group():
        pass

    @app.command()
    def work():
        how(number)
        time.sleep(30)

    done = CliRunner().invoke(app, ["work"])
    assert done.exit_code == 128 + number and done.stderr == "Interrupted\n", done.output
    assert ([number] if how in (cleaned_up_for_long, while_torch_is_imported) else []) == CLEANED
    assert before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
