"""The loop that fills a table: the groups that are due, measured one after the other.

A table's file is replaced whole after every group: a killed run loses one group, and the next goes on from there.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cs336_systems.store import provenance
from cs336_systems.store import rows as store
from cs336_systems.store.files import lock
from cs336_systems.store.machine import environment_digest, has_module, machine_name, memory_of_others_gib
from cs336_systems.store.status import error_status, failure_is_a_row
from cs336_systems.store.table import Table

REFRESH = ("missing", "stale", "all")


class MeasurementError(RuntimeError):
    """Some cases ended in an error; their rows say which, and the tracebacks have been printed."""


class ContextLost(MeasurementError):
    """As that, and nothing more can be measured in this process."""


def _due(
    experiment: Table,
    group: list[Any],
    known: dict[tuple, dict],
    refresh: str,
    current: Callable[[tuple, str], bool],
) -> bool:
    for case in group:
        key = store.case_key(experiment, case)
        row = known.get(key)
        if refresh == "all" or row is None or row["status"].startswith(("error", "oom:")):
            return True
        elsewhere = row["env"] != environment_digest()
        # what was skipped may have become possible: a GPU, triton, a compiler
        if elsewhere and (row["status"].startswith("skipped") or refresh == "stale"):
            return True
        if refresh == "stale" and not current(key, row["code"]):
            return True
    return False


def measure(
    experiment: Table,
    cases: Sequence[Any],
    *,
    refresh: str = "missing",
    root: Path | None = None,
    log: Callable[[str], None] | None = None,
    progress: Callable[[list[list[Any]]], Iterable[list[Any]]] = iter,
) -> int:
    """Measures the groups that are due on this machine and keeps their rows; returns how many there were.

    `refresh`: `"missing"` measures what has no row yet (or ended in an error, or without memory that other processes
    held), `"stale"` also what was measured with earlier code or another environment, `"all"` everything. A case that
    fails becomes an `error` row with its traceback printed, the other groups still run, and at the end
    `MeasurementError` names them. Where the CUDA context is lost, the run ends after that group's rows are written. An
    interrupt loses one group. `log` takes each line of progress (`print`, flushed, by default); `progress` goes through
    the groups that are due, one after the other, and may draw a bar meanwhile.

    Only one process measures a table of a machine at a time; another one waits, and then measures what is left.
    ValueError for a case that no file can keep; StoreError where the table's file is damaged or of another version,
    before anything is measured, and where it cannot be written; ModuleNotFoundError without torch.
    """
    log = log or functools.partial(print, flush=True)  # a run that is cut off shall have told how far it came
    if refresh not in REFRESH:
        raise ValueError(f"unknown refresh {refresh!r}; allowed: {', '.join(REFRESH)}")
    machine, table = machine_name(), experiment.name
    provenance.digest_as_begun(experiment)
    current = provenance.current(experiment, root)
    for case in cases:
        store.case_key(experiment, case)  # raises for what no file can keep
    all_groups, path = store.groups(experiment, cases), store.csv_path(table, machine, root)

    def find_due(refresh: str = refresh) -> list[list[Any]]:
        known = store.load(experiment, path)
        due = [group for group in all_groups if _due(experiment, group, known, refresh, current)]
        failed = {key for key, row in known.items() if row["status"].startswith("error")}
        # what failed before comes last, so that it cannot keep the others from being measured
        return sorted(
            due, key=lambda group: any(store.case_key(experiment, case) in failed for case in group)
        )

    if refresh == "missing" and (old := len(find_due("stale")) - len(find_due())):
        log(
            f"{table} on {machine}: {old} of {len(all_groups)} groups have rows of earlier code or of another "
            "environment; refresh=stale measures them again"
        )
    if find_due():
        if not has_module("torch"):  # or each case would be an error of its own
            raise ModuleNotFoundError(f"measuring {table} needs torch, which is not installed", name="torch")
        waiting = f"{table} on {machine}: another process is measuring it; waiting until it has ended"
        with lock(path.with_name(f".{table}.lock"), busy=lambda: log(waiting)):
            if due := find_due():
                about, took = "", store.seconds_of_groups(experiment, machine, root)
                keys = (store.group_key(experiment, group[0]) for group in due)
                if known := [took[key] for key in keys if key in took]:
                    about = f", about {sum(known) / len(known) * len(due):.0f} s"
                log(f"{table} on {machine}: {len(due)} of {len(all_groups)} groups to measure{about}")
                _fill(experiment, machine, due, root, log, progress)
                return len(due)
    log(f"{table} on {machine}: all {len(all_groups)} groups are measured")
    return 0


def _fill(
    experiment: Table,
    machine: str,
    due: list[list[Any]],
    root: Path | None,
    log: Callable[[str], None],
    progress: Callable[[list[list[Any]]], Iterable[list[Any]]],
) -> None:
    table = experiment.name
    code = provenance.digest_as_begun(experiment)
    if code != provenance.digest(experiment):
        log(
            f"{table}: its code has changed since this process began, which measures what it was; "
            "restart it (a notebook: its kernel) to measure the code as it is"
        )
    store.write_environment(machine, root)
    failed, begin = [], time.monotonic()
    for number, group in enumerate(progress(due), 1):
        start = time.monotonic()
        run = f"{datetime.now(UTC):{store.RUN_TIME}}-{secrets.token_hex(2)}"
        what = ", ".join(f"{f}={getattr(group[0], f)}" for f in experiment.group)
        place = f"  [{number}/{len(due)}] {what}"
        log(place)  # it may take minutes
        results, context_lost = _run(experiment, group)
        stamp = f"{datetime.now(UTC):{store.TIME}}"
        told = {"run": run, "time_utc": stamp, "env": environment_digest(), "code": code}
        rows = [
            dataclasses.asdict(case) | {"status": "ok"} | metrics | told
            for case, metrics in zip(group, results, strict=True)
        ]
        store.write(experiment, machine, rows, root)
        failed += [row for row in rows if str(row["status"]).startswith("error")]
        left = (time.monotonic() - begin) / number * (len(due) - number)
        tally = " ".join(sorted({str(row["status"]).split(":")[0] for row in rows}))
        log(f"{place}: {tally} in {time.monotonic() - start:.1f} s, about {left:.0f} s left")
        if context_lost:
            raise ContextLost(
                f"{table} lost its CUDA context at {what}; run again, in a fresh process, to go on"
            )
    if failed:
        raise MeasurementError(
            f"{len(failed)} cases of {table} ended in an error (their rows say so): {failed[0]['status']}"
        )


def _run(experiment: Table, group: list[Any]) -> tuple[list[dict[str, Any]], bool]:
    """The metrics of a group's cases, and whether the CUDA context was lost.

    What was yielded before an exception stands; it is the status of the cases after it. The exception itself is not
    kept: its frames hold tensors, whose memory the next group needs.
    """
    results: list[dict[str, Any]] = []
    failed: dict[str, Any] = {}
    context_lost = False
    try:
        with failure_is_a_row(failed):
            for metrics in experiment.run_group(group):
                results.append(metrics)
    except Exception as error:  # after which every case in this process would fail
        traceback.print_exc(file=sys.stderr)
        failed["status"], context_lost = error_status(error), True
    if failed:
        results += [dict(failed) for _ in group[len(results) :]]
    assert len(results) == len(group), f"run_group gave {len(results)} results for {len(group)} cases"
    for metrics in results:
        unknown = set(metrics) - {*experiment.metrics, "status"}
        assert not unknown, f"run_group gave {', '.join(sorted(unknown))}, which METRICS does not name"
    lacked_memory = [metrics for metrics in results if metrics.get("status") == "oom"]
    if lacked_memory and (held := memory_of_others_gib()):
        for metrics in lacked_memory:
            metrics["status"] = f"oom: other processes held {held:.0f} GiB"
    return results, context_lost
