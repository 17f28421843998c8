"""A chapter of the book as its notebook sees it: its parameters checked, its rows read, and where they come from."""

from __future__ import annotations

import ast
import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cs336_systems.launch.group import team_size
from cs336_systems.report.tables import chosen, escaped, show
from cs336_systems.store import measuring, provenance, selection
from cs336_systems.store import rows as store
from cs336_systems.store.environment import check_environment
from cs336_systems.store.files import StoreError, naming, read_json
from cs336_systems.store.machine import machine_name
from cs336_systems.store.table import Table

BUILD_VARIABLE = "CS336_BOOK_BUILD"  # set while Sphinx runs the notebooks: nothing is measured then
MACHINE_VARIABLE = "CS336_MACHINE"  # the machines that the book quotes instead of the reference machines
NOT_MEASURED = "not measured"
_TOO_FEW_GPUS = r"skipped: needs \d+ GPUs.*"
MEASURE = ("auto", "yes", "no")
_COMMON = ("measure", "preset", "machine", "refresh")


def named_machines(root: Path) -> list[str]:
    """The machines that `$CS336_MACHINE` names; ValueError for one that is neither this one nor a folder of `root`."""
    text = os.environ.get(MACHINE_VARIABLE, "")
    return _known(text.split(","), root, f"{MACHINE_VARIABLE}: ", "this") if text.strip() else []


def _known(names: Iterable[str], root: Path, where: str, *words: str) -> list[str]:
    """The machines of these names, each once: folders of `root` and, where `"this"` is among the `words`, this one."""
    with naming("read", root):
        folders = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    here = ("this", machine_name()) if "this" in words else ()
    names = [name.strip() for name in names]
    for name in names:
        if name not in (*folders, *here):
            raise StoreError(f"{where}unknown machine {name!r}; allowed: {', '.join([*words, *folders])}")
    return list(dict.fromkeys(machine_name() if name == "this" else name for name in names))


def reference(root: Path) -> dict[str, list[str]]:
    """What `reference.json` of a results folder says: chapter → the machines whose rows the book quotes.

    FileNotFoundError without the folder; StoreError for a machine that there is none of.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"no results folder {root}")
    path = root / "reference.json"
    known = read_json(path)
    for chapter, machines in known.items():
        if not isinstance(machines, list):
            raise StoreError(f"{path}: {chapter}: {machines!r}; expected a list of machines")
        known[chapter] = _known(map(str, machines), root, f"{path}: {chapter}: ")
    return known


def reference_machines(chapter: str, root: Path) -> list[str]:
    """The machines that the book quotes for a chapter: `$CS336_MACHINE`, else its entry in `reference.json`."""
    return named_machines(root) or reference(root).get(chapter, [])


@contextmanager
def in_one_line() -> Iterator[None]:
    """What is wrong with a notebook's parameters, or with where it runs, ends its cell in a line, without frames."""
    try:
        yield
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        line = f"Error: {error}"
        error._render_traceback_ = lambda: [line]  # what IPython shows
        raise


class Chapter:
    """The rows of one measured chapter, seen through a notebook's parameters.

    `tables`
        The chapter's tables, that of its own name first. Here are the rows of that one, `table` gives the others.

    `measure`
        `"auto"` measures what is missing, except while the book is built or when another machine is named;
        `"yes"` insists on measuring (a ValueError where that cannot be); `"no"` only reads.
    `preset`
        `"full"`, `"smoke"`, or `"auto"`: full with a GPU, smoke without.
    `machine`
        `"auto"` is this machine while measuring and the reference machines otherwise; `"this"`, or names of
        folders under `results/`, separated by commas.
    `refresh`
        What measuring does about rows that exist: `"missing"` keeps them, `"stale"` replaces those of
        earlier code, `"all"` replaces all.
    filters
        Fields of the `Case` of any of the chapter's tables: `"all"`, one value, or several separated by commas.

    Every bad name or value is a ValueError that names what is allowed.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        measure: Any = "auto",
        preset: str = "auto",
        machine: str = "auto",
        refresh: str = "missing",
        root: Path | None = None,
        **filters: Any,
    ) -> None:
        check_environment()
        self._together, self.experiment = tables, tables[0]
        self.root = root or store.results_root()
        self.refresh = selection.choice("refresh", refresh, measuring.REFRESH)
        self.preset, self.filters = preset, filters
        self._frame: pd.DataFrame | None = None
        words = {"true": "yes", "false": "no"}  # what YAML and papermill make of these two
        when = selection.choice("measure", words.get(str(measure).strip().lower(), measure), MEASURE)
        self.machines, self.measuring = self._machines(str(machine), when)
        for one in self.machines or [""]:
            self.cases(one)  # raises for a bad preset or filter before anything is measured

    @classmethod
    @in_one_line()
    def from_parameters(
        cls, tables: Sequence[Table], namespace: Mapping[str, Any], root: Path | None = None
    ) -> Chapter:
        """The chapter with the parameters that a notebook's globals hold, or a command line."""
        return cls(tables, root=root, **given_parameters(namespace, [*_COMMON, *selection.fields(tables)]))

    def _machines(self, wanted: str, measure: str) -> tuple[list[str], bool]:
        quoted = reference_machines(self.experiment.name, self.root)
        reading = measure == "no" or os.environ.get(BUILD_VARIABLE) == "1"
        if wanted == "auto":
            return (quoted, False) if reading else ([machine_name()], True)
        named = _known(wanted.split(","), self.root, "", "auto", "this")
        here = named == [machine_name()]
        if measure == "yes" and not (reading or here):
            raise ValueError(
                f"measure=yes needs machine=this; this machine is {machine_name()}, not {wanted}"
            )
        return named, here and not reading

    def _with(self, **changes: Any) -> Chapter:
        """The same but for these attributes, its rows not yet read."""
        other = copy.copy(self)
        vars(other).update(changes, _frame=None)
        return other

    def on(self, machine: str) -> Chapter:
        """The same chapter on another machine, for a sentence about it; all is missing where it has no rows."""
        return self._with(machines=[machine], measuring=False)

    @property
    def tables(self) -> list[Chapter]:
        """All tables of this chapter, through the same parameters."""
        return [self._with(experiment=table) for table in self._together]

    def table(self, name: str) -> Chapter:
        """Another table of this chapter, `kernels` for `leaderboard_kernels`, through the same parameters."""
        main, *others = self._together
        named = {table.name.removeprefix(f"{main.name}_"): table for table in others}
        if name not in named:
            raise ValueError(f"unknown table {name!r} of {main.name}; allowed: {', '.join(named) or 'none'}")
        return self._with(experiment=named[name])

    # ---------------------------------------------------------------------------------- cases and rows
    def cases(self, machine: str = "") -> list[Any]:
        """The cases that the parameters choose, with the preset that `auto` means on a machine."""
        preset = selection.resolve_preset(self.preset, machine)
        return selection.cases(self._together, self.experiment, preset, **self.filters)

    @in_one_line()
    def measure(self) -> None:
        """Measures what is due on this machine, of all tables, if the parameters and the place allow it."""
        if not self.measuring:
            return
        failed, here, self._frame = [], self.machines[0], None
        for table in self._together:
            provenance.digest_as_begun(table)  # before the first of them takes its time
        for table in self.tables:
            cases = selection.of_team(table.experiment, table.cases(here), team_size())
            try:
                measuring.measure(table.experiment, cases, refresh=self.refresh, root=self.root)
            except measuring.ContextLost:
                raise
            except measuring.MeasurementError as error:  # the other tables are measured all the same
                failed.append(str(error))
        if failed:
            raise measuring.MeasurementError("; ".join(failed))
        quoted = reference_machines(self._together[0].name, self.root)
        if quoted and here not in quoted:
            print(f'Below are the rows of {here}; machine = "{quoted[0]}" shows those of the book.')

    def rows(self, **where: Any) -> pd.DataFrame:
        """One row for each machine and chosen case, with the chapter's columns, `machine` first.

        A case without a row has the status `not measured` and empty metrics. Of several machines, one that has not
        measured a case, or has too few GPUs for it, is left out where another one has; where none has, the first one
        stands for all. `where` keeps the rows whose fields (of the case, or `machine`, `status`, ...) equal a value, or
        are in a list of values; an unknown field is a ValueError.
        """
        if self._frame is None:
            several = [self._read(machine) for machine in self.machines or [""]]
            whole = self._without_gaps_filled_elsewhere(pd.concat(several, ignore_index=True))
            # one block of memory for columns of a type: rows are taken out of it by the thousand
            self._frame = whole.copy()
        return chosen(self._frame, **where).reset_index(drop=True)

    def measured(self, **where: Any) -> pd.DataFrame:
        """The rows whose status is `ok`."""
        return self.rows(**where, status="ok")

    def _without_gaps_filled_elsewhere(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The rows without those gaps; where all machines have one for a case, the first one's stays."""
        fields = store.case_fields(self.experiment)
        gap = (frame["status"] == NOT_MEASURED) | frame["status"].str.fullmatch(_TOO_FEW_GPUS)
        key = [frame[field] for field in fields]
        first = ~frame.assign(gap=gap).duplicated([*fields, "gap"])
        return frame[~gap | (first & gap.groupby(key).transform("all"))]

    def _read(self, machine: str) -> pd.DataFrame:
        fields = store.case_fields(self.experiment)
        grid = pd.DataFrame([{f: getattr(c, f) for f in fields} for c in self.cases(machine)], columns=fields)
        known = store.read(self.experiment, machine, self.root)
        for column in known.columns.difference(fields):  # those hold only what the grid does
            known[column] = known[column].map(escaped)
        frame = grid.merge(known.astype({f: grid[f].dtype for f in fields}), on=fields, how="left")
        frame["status"] = frame["status"].astype(object).where(frame["status"].notna(), NOT_MEASURED)
        frame.insert(0, "machine", machine)
        return frame

    # ------------------------------------------------------------------------------ where it comes from
    def stale(self) -> pd.DataFrame:
        """The rows that were measured with other code than this checkout's."""
        frame, current = self.rows(), provenance.current(self.experiment, self.root)
        cases = frame[store.case_fields(self.experiment)].itertuples(index=False, name=None)
        known = [current(case, code) for case, code in zip(cases, frame["code"], strict=True)]
        return frame[(frame["status"] != NOT_MEASURED) & ~np.array(known, dtype=bool)]

    def provenance(self, *more: Chapter) -> str:
        """Sentences (Markdown): on what machine, with which versions and when the rows were measured, those of `more`
        tables included."""
        if not self.machines:
            return f"No machine has been measured for this chapter yet: every value reads *{NOT_MEASURED}*."
        return " ".join(self._provenance_of(machine, (self, *more)) for machine in self.machines)

    def _provenance_of(self, machine: str, tables: Sequence[Chapter]) -> str:
        frame = pd.concat([table.rows(machine=machine) for table in tables])
        there = frame[frame["status"] != NOT_MEASURED]
        if there.empty:
            return f"On `{machine}` nothing of this chapter has been measured."
        days = sorted({str(t)[:10] for t in there["time_utc"]})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        known = store.environments(machine, self.root)
        hardware: dict[str, list[str]] = {}  # by the versions beside it
        for machines, versions in (
            _environment_words(known.get(e, {})) for e in frame["env"].dropna().unique()
        ):
            hardware.setdefault(versions, []).append(machines)
        what = "; ".join(f"{' or '.join(dict.fromkeys(x))}, {versions}" for versions, x in hardware.items())
        ran = lambda rows: ~rows["status"].str.startswith("skipped")
        measured = int(ran(there).sum())
        count = f"{measured}" if len(there) == len(frame) else f"{measured} of {len(frame)}"
        old = {table.experiment.name: int(ran(table.on(machine).stale()).sum()) for table in tables}
        which = ", ".join(f"{n} of `{name}`" for name, n in old.items() if n)
        earlier = f" **Measured with earlier code: {which}.**" if which else ""
        links = ", ".join(filter(None, (table._csv_link(machine) for table in tables)))
        cases = "case" if count == "1" else "cases"
        return f"Measured on `{machine}` ({what}), {when}: {count} {cases}.{earlier} Rows: {links}."

    def _csv_link(self, machine: str) -> str:
        """The table's file, as a link from the book where that is beside the results folder; empty without a file."""
        path = store.csv_path(self.experiment.name, machine, self.root)
        if not path.is_file():
            return ""
        if not (self.root.parent / "book").is_dir():
            return f"`{path.name}`"
        return f"[`{path.name}`](../{path.relative_to(self.root.parent).as_posix()})"

    def show(self, frame: pd.DataFrame, caption: str, name: str, **options: Any) -> None:
        """`tables.show`. A column `machine` that holds only one name is left out; where the chapter shows several
        machines, the caption says the name."""
        if "machine" in frame and frame["machine"].nunique() == 1:
            caption += f" Machine: `{frame['machine'].iloc[0]}`." if len(self.machines) > 1 else ""
            frame = frame.drop(columns="machine")
        show(frame, caption=caption, name=name, **options)

    def problems(self) -> list[str]:
        """What keeps the chapter's page from being final: cases not measured, errors, odd numbers, earlier code."""
        frame, name = self.rows(), self.experiment.name
        metrics = frame[list(self.experiment.metrics)].replace("", None)
        signed = [m for m in metrics.select_dtypes("number") if "error" not in m]  # which may have a sign
        known = {e for machine in self.machines for e in store.environments(machine, self.root)}
        counts = {
            "not measured": (frame["status"] == NOT_MEASURED).sum(),
            "ended in an error": frame["status"].str.startswith("error").sum(),
            "without memory that other processes held": frame["status"].str.startswith("oom:").sum(),
            "without a number": ((frame["status"] == "ok") & metrics.isna().all(axis=1)).sum(),
            "with a negative number": (metrics[signed] < 0).any(axis=1).sum(),
            "of an environment that machine.json lacks": (~frame["env"].dropna().isin(known)).sum(),
            "measured with earlier code": len(self.stale()),
        }
        return [f"{name}: {n} of {len(frame)} cases {what}" for what, n in counts.items() if n]


# ---------------------------------------------------------------------------------- parameters
@in_one_line()
def given_parameters(namespace: Mapping[str, Any], allowed: Sequence[str]) -> dict[str, Any]:
    """The parameters, of those that are allowed, that a notebook's globals hold.

    papermill only logs a misspelled `-p` name, so the newest cell that begins with `# Parameters`, the one that it
    injects, is read again here: a name in it that is not allowed is a ValueError.
    """
    cells = [cell for cell in namespace.get("In", []) if cell.lstrip().startswith("# Parameters")]
    nodes = ast.walk(ast.parse(cells[-1] if cells else ""))
    names = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    if unknown := [name for name in names if name not in allowed]:
        raise ValueError(f"unknown parameter {', '.join(unknown)}; allowed: {', '.join(allowed)}")
    return {name: namespace[name] for name in allowed if name in namespace}


def _environment_words(environment: Mapping[str, Any]) -> tuple[str, str]:
    """Of what hardware, and with which versions."""
    env = {key: escaped(value) for key, value in environment.items()}
    if gpus := env.get("gpus"):
        of = f" of {env['gpus_in_machine']}" if "gpus_in_machine" in env else ""
        hardware, driver = f"{gpus}{of} × {env['gpu']}", f"driver {env.get('driver')}, "
    else:
        hardware, driver = env.get("cpu", "unknown CPU"), ""
        hardware += f", {env['cores']} cores" if "cores" in env else ""
    return hardware, f"{driver}torch {env.get('torch')}, triton {env.get('triton')}"
