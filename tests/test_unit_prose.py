"""Sentences are held against rows: missing numbers, other machines, changed rows, what is no condition."""

from __future__ import annotations

import math
import operator

import numpy as np
import pandas as pd
import pytest

from cs336_systems.report import prose
from cs336_systems.report.prose import Number, answer, claim, compare, every, one, published, say, span


def frame(*rows):
    base = {
        "machine": "h200-x1", "impl": "a", "repeat": 0, "ms": 1.0, "backend": "x", "status": "ok",
        "run": "r1",
    }  # fmt: skip
    return pd.DataFrame([base | row for row in rows])


ROWS = frame(
    {"impl": "ours", "ms": 1.0},
    {"impl": "ours", "ms": 1.05, "repeat": 1},
    {"impl": "slow", "ms": 1.5},
    {"impl": "near", "ms": 1.06},
    {"impl": "far", "ms": 1.5, "run": "r2"},
    {"impl": "big", "ms": math.nan, "status": "oom"},
    {"impl": "never", "ms": math.nan, "status": "not measured", "run": None, "backend": None},
)


@pytest.fixture
def shown(monkeypatch):
    """What is displayed, as Markdown."""
    texts = []

    def keep(thing, **options):
        texts.append(thing["text/markdown"] if isinstance(thing, dict) else thing.data)

    monkeypatch.setattr("IPython.display.display", keep)
    monkeypatch.setattr(prose, "made", [])
    prose.consulted.clear()
    return texts


def row(impl, **case):
    return one(ROWS, impl=impl, **({"repeat": 0} | case))


# ---------------------------------------------------------------------------------------------- numbers
def test_numbers_format_themselves():
    x = Number(1234.5678)
    assert (f"{x}", f"{x:4}", f"{x:.1f}", f"{Number(0.1234):2%}") == ("1,230", "1,235", "1234.6", "12\u00a0%")
    assert str(x / 2 + 1) == "618"


@pytest.mark.parametrize("make", [
    lambda x: x + 1, lambda x: 1 - x, lambda x: 2 * x / 3, lambda x: -x, lambda x: abs(x), lambda x: x**0.5,
    lambda x: 1 / x, lambda x: Number(2) / x, lambda x: span([1.0, x]).low, lambda x: np.float64(1) - x,
])  # fmt: skip
def test_a_missing_number_stays_missing_and_says_why(make):
    found = make(Number(math.nan, "too hot"))
    assert found.missing == "too hot" and "too hot" in f"{found:3}"


def test_a_division_by_zero_is_missing_and_comparisons_with_it_are_none():
    assert (Number(1) / 0).missing == (1 / Number(0)).missing == "divided by zero"
    x = Number(math.nan, "gone")
    assert [x < 1, x <= 1, x > 1, x >= 1, x == 1, x != 1, Number(1) < x] == [None] * 7
    assert [compared(np.float64(1), x) for compared in (operator.lt, operator.ge, operator.ne)] == [None] * 3
    assert (Number(1) < 2) is True and (Number(1) > 2) is False


# ------------------------------------------------------------------------------------------------- rows
def test_one_finds_a_row_and_knows_its_status():
    assert row("ours").ms == 1.0 and row("ours").backend == "x"
    assert (row("ours").ok, row("ours").oom, row("big").oom, row("never").oom) == (True, False, True, None)
    assert row("big").ms.missing == "big: out of memory"
    assert row("nobody").ms.missing == "nobody: not measured"
    assert row("never").ms.missing == "never: not measured on h200-x1"
    assert row("never").backend.missing


def test_one_raises_for_what_the_author_misspelled():
    with pytest.raises(ValueError, match=r"unknown column 'imp'; allowed: machine, impl"):
        one(ROWS, imp="ours")
    with pytest.raises(ValueError, match=r"2 rows, which differ in repeat, ms; name more columns"):
        one(ROWS, impl="ours")
    with pytest.raises(AttributeError, match=r"unknown column 'mss'; allowed"):
        _ = row("ours").mss
    with pytest.raises(AttributeError, match=r"unknown column 'mss'"):
        _ = row("nobody").mss


def test_of_several_machines_the_first_that_has_the_case_counts():
    rows = frame({"machine": "x", "status": "not measured", "ms": math.nan}, {"machine": "y", "ms": 2.0},
                 {"machine": "z", "ms": 3.0})  # fmt: skip
    assert one(rows, impl="a").ms == 2.0


def test_published_figures(monkeypatch, tmp_path):
    assert published("best verified").value.missing
    monkeypatch.delenv("CS336_RESULTS")
    assert published("best verified").value == 5.364
    with pytest.raises(ValueError, match=r"'zzz' begins 0 published figures; there are: best verified"):
        published("zzz")


# ------------------------------------------------------------------------------------------ comparisons
def test_the_noise_is_that_of_the_case_measured_twice_in_the_run():
    slow, near = compare("ms", row("slow"), row("ours"), ROWS), compare("ms", row("near"), row("ours"), ROWS)
    assert slow.noise == pytest.approx(0.05) and slow.ratio == 1.5
    assert (slow.less, slow.more, slow.even) == (False, True, False)
    # between the noise and half as much again
    assert (near.less, near.more, near.even) == (False, True, False)
    back = compare("ms", row("ours"), row("slow"), ROWS)
    assert (back.less, back.more, back.even) == (True, False, False)


def test_the_noise_is_never_below_its_floor():
    rows = frame({"impl": "ours"}, {"impl": "ours", "repeat": 1, "ms": 1.001}, {"impl": "b", "ms": 1.02})
    found = compare("ms", one(rows, impl="b"), one(rows, impl="ours", repeat=0), rows)
    assert found.noise == prose.LEAST_NOISE and found.even and not found.more


@pytest.mark.parametrize(
    "rows", [ROWS, ROWS[ROWS.repeat == 0], ROWS.drop(columns="repeat")], ids=["run", "pair", "column"]
)
def test_without_a_pair_in_the_run_nothing_is_even(rows):
    impl = "far" if "repeat" in rows and (rows.repeat > 0).any() else "slow"
    rows = rows if impl == "far" else rows.drop_duplicates("impl")
    a, b = one(rows, impl=impl), one(rows[rows.ms != 1.05], impl="ours")
    found = compare("ms", a, b, rows)
    assert (found.noise, found.more, found.even) == (prose.UNKNOWN_NOISE, True, None)


def test_a_comparison_with_a_missing_number_is_none():
    for impl in ("big", "never", "nobody"):
        found = compare("ms", row(impl), row("ours"), ROWS)
        assert (found.less, found.more, found.even) == (None, None, None) and found.ratio.missing


def test_every_and_span():
    assert [every(), every([]), every([True, None])] == [None] * 3
    assert (every(True, False), every(True, True)) == (False, True)
    assert every(x < 2 for x in (Number(1), Number(1.5))) is True
    assert f"{span(ROWS[ROWS.status == 'ok'], 'ms')}" == "1.00 to 1.50" and f"{span([1.0, 1.0])}" == "1.00"
    assert span(ROWS, "ms").low.missing and span([]).high.missing


# -------------------------------------------------------------------------------------------- sentences
def test_a_sentence_with_a_missing_number_is_not_shown(shown):
    say(f"It takes {row('big').ms} ms.")
    claim(f"It takes {row('nobody').ms} ms.", True)
    answer("memory_profiling (a)", f"{row('never').ms / 2} ms", brief="Long.")
    say(f"It takes {math.nan:.2f} ms, a nanosecond.")
    assert shown[:2] == ["*Not measured: big: out of memory.*", "*Not measured: nobody.*"]
    assert shown[3] == "*Not measured.*"
    assert "never on h200-x1" in shown[2] and not any("takes" in text for text in shown)
    assert [s.outcome for s in prose.made] == [None, None]
    claim("Far is even.", compare("ms", row("far"), row("ours"), ROWS).even)  # of an unknown condition
    assert shown[4:] == ["*Not measured.*"] and prose.made[2].outcome is None


def test_a_claim_that_the_rows_do_not_bear_out_is_marked_and_says_against_what(shown):
    slow = compare("ms", row("slow"), row("ours"), ROWS)
    claim("Slow is faster.", slow.less, slow.more)
    claim("Slow is slower.", slow.more)
    assert shown == [f"Slow is faster. **[{prose.NOT_BORNE_OUT}]**", "Slow is slower."]
    wrong, right = prose.made
    assert wrong.outcome is False and right.outcome is True and right.against == ()
    assert wrong.against == ("(ms of slow 1.500 and ours 1.000: ratio 1.500, noise 5.0%).less",)


def test_what_holds_by_a_little_is_noted(shown):
    near = compare("ms", row("near"), row("ours"), ROWS)
    claim("Slower.", near.more)
    claim("Slow.", compare("ms", row("slow"), row("ours"), ROWS).more)
    assert [len(s.narrow) for s in prose.made] == [1, 0]


@pytest.mark.parametrize(
    "conditions", [(), (1.5,), ("yes",), (ROWS,), (compare("ms", row("slow"), row("ours"), ROWS),)]
)
def test_what_is_no_condition(shown, conditions):
    with pytest.raises(TypeError, match="condition"):
        claim("Something.", *conditions)
    assert not shown


def test_an_answer_is_a_box_with_a_label(shown):
    answer("nsys_profile (a)", f"**{row('ours').ms:3} ms**", row("ours").ok, brief="Yes.")
    assert ":name: answer-nsys-profile-a" in shown[0] and "**1.00 ms**" in shown[0]
    assert prose.made[0].part == "nsys_profile (a)"
