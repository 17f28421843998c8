"""How commands behave on a terminal: Ctrl-C ends them in a line, options take several values."""

from __future__ import annotations

import errno
import functools
import logging
import os
import signal
import sys
import threading
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer
import typer.core

from cs336_systems.store.files import naming
from cs336_systems.store.machine import has_module

# what the system has no more of, whatever the command: room, names, open files
EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE}

say = functools.partial(typer.echo, err=True)  # progress goes to stderr: stdout is for what was asked for


@contextmanager
def wrong_input() -> Iterator[None]:
    """Shows what is wrong with the command line, or with where it was called, and ends with exit code 2."""
    from cs336_systems.store.environment import check_environment

    try:
        check_environment()
        yield
    except (ValueError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        say(f"Error: {error}")
        raise typer.Exit(2) from error


def fail(message: object) -> typing.NoReturn:
    """Says what failed, and ends with exit code 1."""
    say(f"Error: {message}")
    raise typer.Exit(1)


def check_writable(option: str, file: Path) -> None:
    """ValueError, before anything is measured, for a file that could not be written in the end."""
    try:
        new = not file.exists()
        file.open("a").close()
        if new:
            file.unlink()
    except OSError as error:
        raise ValueError(f"{option} {file}: {error.strerror}") from error


def check_json(file: str | None) -> None:
    """`check_writable` of what `--json` names, if it is a file."""
    if file not in (None, "-"):
        check_writable("--json", Path(file))


def wrote_json(file: str | None, text: str) -> bool:
    """What `--json FILE` does: writes the text there, or prints it for "-". Whether it has been printed."""
    if file not in (None, "-"):
        with wrong_input(), naming("write", Path(file)):
            Path(file).write_text(text + "\n", encoding="utf-8")
    elif file:
        typer.echo(text)
    return file == "-"


class Interruptible(typer.core.TyperGroup):
    """Commands that end with one line and exit code 130 after Ctrl-C (143 after SIGTERM), or 1 where the system has no
    more room or files to give, or a package is not installed.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            with suppress(OSError):
                say(f"Error: cannot write {error.filename or 'the output'}: {error.strerror}")
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or what is left to print fails once more
            sys.exit(1)
        except ImportError as error:
            lacking = error if error.name else error.__cause__  # pandas tells of its own in words only
            package = (getattr(lacking, "name", None) or "").partition(".")[0]
            if not package or has_module(package):
                raise
            say(
                f"Error: {package} is not installed; `pip install -e .` in the checkout brings what commands need"
            )
            sys.exit(1)

    def invoke(self, ctx: typer.Context) -> Any:
        _open_closed_streams()
        with _interrupts() as heard:
            try:
                return super().invoke(ctx)
            except BaseException as error:  # libraries in C make other errors of an interrupt
                if not heard and not isinstance(error, KeyboardInterrupt):
                    raise
                if os.environ.get("RANK", "0") == "0":  # of torchrun's ranks the first speaks for all
                    typer.echo("Interrupted", err=True)
                raise typer.Exit(128 + (heard or [signal.SIGINT])[0]) from None


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """SIGINT and SIGTERM raise KeyboardInterrupt in its block; those that came. Finalizers and libraries in C drop
    exceptions: while none is on its way through the main thread, the signal comes again each second."""
    heard: list[int] = []
    again, ended = threading.Event(), threading.Event()

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        logging.disable()  # what libraries tell of the sockets and tasks that they leave behind
        if again.is_set():
            again.clear()
            error = sys.exception()
            while error is not None:  # what is being cleaned up after
                if isinstance(error, KeyboardInterrupt):
                    return
                error = error.__context__
        heard.append(number)
        if len(heard) == 1:
            repeater.start()
        if not _torch_is_imported(frame):
            raise KeyboardInterrupt

    def repeat() -> None:
        while not ended.wait(1):
            again.set()
            signal.pthread_kill(threading.main_thread().ident, heard[0])

    def dropped(what: sys.UnraisableHookArgs) -> None:
        if not (heard and issubclass(what.exc_type, KeyboardInterrupt)):
            hook(what)

    repeater = threading.Thread(target=repeat, daemon=True)
    before, hook = {}, sys.unraisablehook
    if callable(signal.getsignal(signal.SIGINT)):  # a shell's background jobs ignore it
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    # torchrun's ranks wait for each other in C, where only the system's own way ends them
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and "RANK" not in os.environ:
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, interrupt)
    sys.unraisablehook = dropped
    try:
        yield heard
    finally:
        ended.set()
        if heard:
            repeater.join()
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _torch_is_imported(frame: types.FrameType | None) -> bool:
    """Whether one of torch's modules is, which in C++ ends the process where an exception passes through."""
    while frame and not (
        frame.f_code.co_name == "<module>" and frame.f_globals["__name__"].partition(".")[0] == "torch"
    ):
        frame = frame.f_back
    return frame is not None


def _open_closed_streams() -> None:
    """Where stdout or stderr is closed, /dev/null takes its place: processes that are started here need both."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w"))  # noqa: SIM115


# options with one file each, whose name is not a list
ONE_FILE = {"--json", "--out", "--memory-snapshot"}


class Lists(typer.core.TyperCommand):
    """A command whose options take several values with blanks between them too: `--size small medium`. Those of an
    option that is given twice stand together: none is dropped."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        takes = {name for p in self.params for name in p.opts if not getattr(p, "is_flag", False)} - ONE_FILE
        given: dict[str, list[str]] = {}
        rest: list[str] = []
        value_of = ""  # the option whose value the next word is, or adds to
        for arg in args:
            name, equals, value = arg.partition("=")
            if name in takes:
                value_of = name
                given.setdefault(name, []).extend([value] * bool(equals))
            elif arg.startswith("-") and not (value_of and arg[1:2].isdigit()):
                value_of = ""
                rest.append(arg)
            else:
                (given[value_of] if value_of else rest).append(arg)
        joined = [
            word for name, values in given.items() for word in (name, *[",".join(values)] * bool(values))
        ]
        return super().parse_args(ctx, [*rest, *joined])
