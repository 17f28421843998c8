"""Cases that ranks measure in one launch: what is refused, and what a launch that fails leaves to the others."""

from dataclasses import dataclass

import pytest

from cs336_systems.chapters.shared import needs
from cs336_systems.launch.start import LaunchError
from cs336_systems.store import machine
from cs336_systems.store.status import Skip

pytest.importorskip("torch")
from cs336_systems.chapters.shared import on_ranks


@dataclass(frozen=True)
class Case:
    wrapper: str
    repeat: int = 0
    world_size: int = 2

    @property
    def turn(self) -> str:
        return self.wrapper


def on_a_rank(rank, cases, bad):
    """Launched by the test: rank 1 fails in the turn of `bad`."""
    for case in (Case(**case) for case in cases):
        on_ranks.begin_turn(rank, case)
        if case.wrapper == bad and rank.rank == 1:
            raise MemoryError("CUDA out of memory")
    return [{"number": place} for place in range(len(cases))]


def refuse(case):
    if case.wrapper == "torch":
        raise Skip("needs torch")


@pytest.mark.slow
def test_what_fails_on_a_rank_is_the_case_whose_turn_it_was(capfd):
    """Both of its rows, and no other's."""
    cases = [Case(w) for w in ("ddp", "flat", "torch", "naive")] + [Case("flat", repeat=1)]
    options = {"arguments": {"bad": "flat"}, "collective_timeout_s": 20}
    found = on_ranks.measured(f"{__name__}:on_a_rank", cases, refuse, **options)
    oom = {"status": "oom"}
    assert found == [{"number": 0}, oom, {"status": "skipped: needs torch"}, {"number": 1}, oom]


def test_each_launch_is_without_what_failed_before(monkeypatch):
    said = {"fsdp": "CUDA out of memory", "fsdp2": "signal SIGABRT"}
    asked = []

    def launch(function, world_size, arguments, *, log):
        wrappers = [case["wrapper"] for case in arguments["cases"]]
        asked.append(wrappers)
        for wrapper in wrappers:
            log(f"[rank 0] turn of {wrapper}")
            if wrapper in said:
                raise LaunchError(f"rank 1 of 2: {said[wrapper]}", 1)
        return [[{"rank": rank}] * len(wrappers) for rank in range(2)]

    monkeypatch.setattr(on_ranks, "launch", launch)
    cases = [Case(w) for w in ("ddp", "fsdp", "fsdp2")] + [Case("fsdp", repeat=1)]
    found = on_ranks.measured("m:f", cases, refuse, read=lambda cases, by_rank: by_rank[1])
    statuses = [row.get("status") for row in found]
    assert statuses == [None, "oom", "error: LaunchError: rank 1 of 2: signal SIGABRT", "oom"]
    assert found[0] == {"rank": 1} and asked == [["ddp", "fsdp", "fsdp2", "fsdp"], ["ddp", "fsdp2"], ["ddp"]]


def test_what_fails_before_any_turn_fails_for_all(monkeypatch, capsys):
    asked = []

    def launch(*arguments, **options):
        asked.append(arguments)
        raise LaunchError("rank 1 of 2: signal SIGKILL\nwhat it said", 1)

    monkeypatch.setattr(on_ranks, "launch", launch)
    found = on_ranks.measured("m:f", [Case("ddp"), Case("flat")], refuse)
    assert found == [{"status": "error: LaunchError: rank 1 of 2: signal SIGKILL"}] * 2 and len(asked) == 1
    assert "what it said" in capsys.readouterr().err


def test_a_run_that_takes_too_long_is_no_cases_failure(monkeypatch):
    asked = []

    def launch(function, world_size, arguments, *, log):
        asked.append(arguments)
        log("[rank 0] turn of flat")
        raise LaunchError("m:f on 2 ranks took longer than 9 s and was ended")

    monkeypatch.setattr(on_ranks, "launch", launch)
    found = on_ranks.measured("m:f", [Case("ddp"), Case("flat"), Case("naive")], refuse)
    assert len({row["status"] for row in found}) == 1 and "took longer" in found[0]["status"]
    assert len(asked) == 1  # the others would take as long again, one by one


def test_what_fails_after_the_ranks_have_ended_fails_for_all(monkeypatch):
    asked = []

    def launch(function, world_size, arguments, *, log):
        asked.append(arguments)
        for case in arguments["cases"]:
            log(f"[rank 0] turn of {case['wrapper']}")
        return [[{"number": 1}] * len(arguments["cases"])] * 2

    def read(cases, by_rank):
        raise OSError("No space left on device")

    monkeypatch.setattr(on_ranks, "launch", launch)
    found = on_ranks.measured("m:f", [Case("ddp"), Case("flat"), Case("naive")], refuse, read=read)
    assert found == [{"status": "error: OSError: No space left on device"}] * 3 and len(asked) == 1


def test_what_a_machine_lacks_is_named(monkeypatch):
    monkeypatch.setattr(machine, "gpu_names", lambda: ["NVIDIA H200"])
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: 2**33)
    needs.need_gpus(1), needs.need_memory(2**33), needs.need_memory(None)
    with pytest.raises(Skip, match=r"^needs 2 GPUs; there is 1$"):
        needs.need_gpus(2)
    with pytest.raises(Skip, match=r"^needs about 9\.0 GiB of memory; 8\.0 GiB are free$"):
        needs.need_memory(9 * 2**30)
    monkeypatch.setenv("CS336_NODES", "2")  # of several nodes all count
    needs.need_gpus(2)
