"""Ctrl-C and SIGTERM at random times in the training system's commands: a line, an exit code, and nothing is left.

python -m pytest -m chaos            (CS336_TEST_INTERRUPTS=50 for each command; CS336_TEST_SEED repeats the times)
"""

import os
import signal
import time

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from test_chaos_processes import Tree, dice, until  # noqa: F401  a fixture

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="finds processes in /proc"),
]
CS336 = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
CS336 += "from cs336_systems.__main__ import main; print('up', flush=True); main()"
SMALL = ["--vocab-size", "300", "--train-mb"]
COMMANDS = {  # and the seconds that it may take until the signal
    "data": (["data", "--train-mb", "6"], 5),
    "tokenize": (["tokenize", *SMALL, "2"], 6),
    "train": (["train", *SMALL, "1", "--steps", "30", "--batch", "2", "--set", "text.valid_mb=0.1"], 14),
    "speedrun": (["speedrun", "--minutes", "0.1"], 14),
}
TIMES = int(os.environ.get("CS336_TEST_INTERRUPTS", "3"))


@pytest.mark.parametrize("number", range(TIMES))
@pytest.mark.parametrize("what", COMMANDS)
def test_no_interrupt_is_lost(what, number, dice, tmp_path):  # noqa: F811
    words, seconds = COMMANDS[what]
    how = dice.choice([signal.SIGINT, signal.SIGINT, signal.SIGTERM])
    with Tree(["-c", CS336, *words, "--out", str(tmp_path / "run")], tmp_path) as tree:
        assert tree.command.stdout.readline() == "up\n"
        time.sleep(dice.uniform(0, seconds))
        ended = tree.command.poll() is not None
        tree.command.send_signal(how)
        printed = tree.end(30)
    code = tree.command.returncode
    assert "Traceback" not in printed and "rror" not in printed, printed
    saved = how == signal.SIGTERM and code == 0  # while it trained
    unheard = code == -how  # before the command was found, or after it had ended
    assert ended or saved or unheard or (code == 128 + how and printed.endswith("Interrupted\n")), (
        code,
        printed,
    )
    left = [*tmp_path.rglob(".making"), *tmp_path.rglob("*.part")]
    assert not left and not [p for p in (tmp_path / "tmp").iterdir() if "inductor" not in p.name]
