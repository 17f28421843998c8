"""Numbers that are given as text are read in one way, whatever command or file they stand in."""

import pytest

from cs336_systems import chapters
from cs336_systems.chapters.training import run as training_run
from cs336_systems.chapters.training import sweep as training_sweep
from cs336_systems.store import numbers, selection
from cs336_systems.training.config import load

WHOLE = ["", "x", "1_0", "１２", "١", "1.0", "1e3", "0x10", "--1", "1 0", "inf", "9" * 5000]
NUMBER = [
    "", ".", "x", "1_0.5", "１.5", "1e", "0x1p3", "nan", "inf", "-Infinity", "1e400", "1e-400", "-0.01e-399",
]  # fmt: skip


def _sweep(text):
    return selection.named(chapters.load("flash_bench"), seq_len=text)["seq_len"][0]


@pytest.mark.parametrize(
    "read",
    [numbers.whole, _sweep, lambda text: load(None, {"logging.every": text}).logging.every,
     lambda text: training_sweep.tier(f"{text}:1")[0]],
)  # fmt: skip
def test_whole_numbers(read):
    assert [read(text) for text in ("7", " 128 ", "0012", "+5")] == [7, 128, 12, 5]
    for text in WHOLE:
        with pytest.raises(ValueError, match=r"allowed|must be"):
            read(text)


@pytest.mark.parametrize(
    "read",
    [numbers.number, training_run.CHOICES["minutes"],
     lambda text: load(None, {"schedule.minutes": text}).schedule.minutes],
)  # fmt: skip
def test_numbers(read):
    told = ("7", " 0.5 ", "1.", ".25", "1E-3", "+2e+1")
    assert [read(text) for text in told] == [7, 0.5, 1, 0.25, 1e-3, 20]
    for text in NUMBER:
        with pytest.raises(ValueError, match=r"allowed|must be"):
            read(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.toml", "[optimizer]\nlearning_rate = {}\n"),
        ("run.json", '{{"optimizer": {{"learning_rate": {}}}}}'),
    ],
)
def test_a_file_s_number_does_not_become_the_default(name, text, tmp_path):
    file = tmp_path / name
    file.write_text(text.format("1e-400"))
    with pytest.raises(ValueError, match="1e-400"):
        load(file)
    for zero in ("0.0", "0e5", "-0.0"):
        file.write_text(text.format(zero))
        assert load(file).optimizer.learning_rate > 0  # the default
