"""Running the book's notebooks with papermill: parameters checked beforehand, this interpreter's kernel.

    cs336 run hardware -p dtype=bf16

The executed notebook, outputs included, is written to `_build/notebooks/<chapter>.ipynb`; the rows that it
measures go to `results/`, so a run that was cut off goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

KERNEL = "python3"


def check(notebook: Path, given: Iterable[str]) -> None:
    """ValueError for names that are none of a notebook's parameters, with those that are. (What values they may have,
    all of them texts, the chapter says.)

    papermill itself only logs a name that the notebook does not know, and runs with the default.
    """
    import papermill

    known = papermill.inspect_notebook(notebook)
    if unknown := [name for name in given if name not in known]:
        raise ValueError(
            f"{notebook.stem} has no parameter {', '.join(unknown)}; its parameters are {', '.join(known)}"
        )


@contextmanager
def own_kernel() -> Iterator[None]:
    """Makes the kernel `python3` mean this interpreter, whatever is registered in the user's home, and the folder of
    the results the one that it is here: it runs in the checkout."""
    before = os.environ.copy()
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "kernels" / KERNEL
        spec.mkdir(parents=True)
        # Newer versions warn at each start that they listen unencrypted, on loopback; and what the processes print that
        # a cell starts would be captured as well as passed on: on a terminal that shows both it would stand twice.
        told = ("--log-level=ERROR", "--IPKernelApp.capture_fd_output=False")
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", *told]
        (spec / "kernel.json").write_text(
            json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}), encoding="utf-8"
        )
        path = before.get("JUPYTER_PATH")
        os.environ["JUPYTER_PATH"] = folder + (os.pathsep + path if path else "")
        if named := before.get("CS336_RESULTS"):
            os.environ["CS336_RESULTS"] = str(Path(named).expanduser().absolute())
        try:
            yield
        finally:
            del os.environ["JUPYTER_PATH"]
            os.environ.update(before)


def run(
    root: Path, chapters: Sequence[str], given: Mapping[str, str], log: Callable[[str], None] = print
) -> list[str]:
    """Executes the chapters' notebooks in order, and returns the names of those that failed.

    `root` is the checkout. All names and parameters are checked before the first notebook starts:
    FileNotFoundError for a chapter without a notebook, ValueError for parameters. A failing notebook's
    traceback is logged, and the next one runs.
    """
    import ipykernel  # noqa: F401  what the kernel is started with: known before it would not answer
    import papermill
    from nbclient.exceptions import DeadKernelError

    notebooks = [root / "book" / f"{chapter}.ipynb" for chapter in chapters]
    for notebook in notebooks:
        if not notebook.is_file():
            raise FileNotFoundError(f"no notebook {notebook}")
        check(notebook, given)
    output = root / "_build" / "notebooks"
    output.mkdir(parents=True, exist_ok=True)
    failed = []
    with own_kernel():
        for notebook in notebooks:
            target = output / notebook.name
            log(f"{notebook.stem}: running, into {target}")
            try:
                papermill.execute_notebook(
                    notebook, target, parameters=dict(given), kernel_name=KERNEL, cwd=root,
                    progress_bar=sys.stderr.isatty(), stdout_file=sys.stdout, stderr_file=sys.stderr,
                    shutdown_kernel="immediate",  # or an interrupted kernel tells of its sockets
                )  # fmt: skip
            except (papermill.PapermillExecutionError, DeadKernelError) as error:
                log(f"{notebook.stem}: failed\n{error}")
                failed.append(notebook.stem)
    return failed
