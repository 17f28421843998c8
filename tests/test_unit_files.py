"""Files: one process at a time writes into a folder, regular files only are read, what cannot be written is said."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from cs336_systems.cli import main as cli
from cs336_systems.store import files
from cs336_systems.store.files import StoreError, alone

PACKAGE = Path(files.__file__).resolve().parents[1]
HOLD = """
import sys, time
from pathlib import Path
from cs336_systems.store import files
with files.alone(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


# ------------------------------------------------------------------------------------------------- one at a time
def test_one_process_at_a_time_writes_into_a_folder(tmp_path):
    folder, said = tmp_path / "new" / "run", []
    command, environment = (
        [sys.executable, "-c", HOLD, str(folder)],
        {**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as other:
        other.stdout.readline()
        with (
            pytest.raises(StoreError, match=r"^\S+run: another process is writing into it; wait"),
            alone(folder),
        ):
            pass
        kill = threading.Timer(0.1, other.kill)  # its lock is gone with it
        with alone(folder, lambda line: (said.append(line), kill.start())):
            assert len(said) == 1 and "waiting" in said[0]


@pytest.mark.parametrize(
    "words", ["data", "tokenize", "train", "speedrun --size mini"], ids=lambda words: words.split()[0]
)
def test_a_command_is_alone_in_its_folder(tmp_path, monkeypatch, words):
    pytest.importorskip("torch")
    pytest.importorskip("tokenizers")
    from cs336_systems.training import pipeline, text

    seen = []

    def inside(*arguments):
        with pytest.raises(StoreError, match="another process"), alone(tmp_path / "run"):
            pass
        seen.append(arguments)

    monkeypatch.delenv("RANK", raising=False)
    for module, name in ((text, "prepare"), (pipeline, "prepare"), (pipeline, "_finish")):
        monkeypatch.setattr(module, name, inside)
    monkeypatch.setattr(pipeline, "_finished", lambda config: {"step": 1})
    done = CliRunner().invoke(cli.app, [*words.split(), "--out", str(tmp_path / "run")])
    trains = words in ("train", "speedrun --size mini")  # its text is looked at before its result
    assert done.exit_code == 0 and len(seen) == 1 + trains, done.output
    if trains:
        with alone(tmp_path / "run"):
            refused = CliRunner().invoke(cli.app, [*words.split(), "--out", str(tmp_path / "run")])
        lines = refused.stderr.strip().splitlines()
        assert refused.exit_code == 2 and len(lines) == 1 and "another process" in lines[0] and len(seen) == 2


def test_one_book_at_a_time(tmp_path, monkeypatch):
    from cs336_systems.report import build

    def inside(*arguments):
        with pytest.raises(StoreError, match="another process"), alone(tmp_path / "_build"):
            pass
        return ["built"]

    monkeypatch.setattr(build, "_built", inside)
    monkeypatch.setattr(build, "package_version", lambda name: "1.0.4")
    monkeypatch.setenv("CS336_RESULTS", str(tmp_path))
    monkeypatch.setattr(build, "reference", lambda root: ())
    monkeypatch.setattr(build, "named_machines", lambda root: ())
    assert build.build(list, root=tmp_path) == ["built"]


def test_a_folder_that_stays_empty_goes_with_those_made_for_it(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("mine", "new/er/est"):
        with pytest.raises(KeyError), alone(tmp_path / name):
            raise KeyError
    assert [*tmp_path.iterdir()] == [tmp_path / "mine"]
    with alone(tmp_path / "new" / "er"):
        (tmp_path / "new" / "er" / "file").touch()
    assert (tmp_path / "new" / "er" / "file").exists()


def test_who_waited_for_a_folder_that_went_is_alone_in_the_next_one(tmp_path):
    run = tmp_path / "new" / "run"
    first = alone(run)
    first.__enter__()
    with alone(run, lambda line: first.__exit__(None, None, None)):  # which stayed empty
        assert run.is_dir()
        with pytest.raises(StoreError, match="another process"), alone(run):
            pass


def test_who_is_refused_leaves_the_folder_to_who_holds_it(tmp_path, monkeypatch):
    run, mkdir, held = tmp_path / "run", Path.mkdir, []

    def sooner(path, *arguments, **options):
        """Another makes it, and locks it, just before."""
        monkeypatch.setattr(Path, "mkdir", mkdir)
        held.append(alone(run))
        held[0].__enter__()
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", sooner)
    for _ in range(2):
        with pytest.raises(StoreError, match="another process"), alone(run):
            pass
        assert run.is_dir()
    held[0].__exit__(None, None, None)
    assert not run.exists()


def test_a_disk_without_locks_is_written_to(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(files.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files, "fcntl", SimpleNamespace(flock=flock, LOCK_EX=1, LOCK_NB=2))
    with alone(tmp_path):
        pass


# ------------------------------------------------------------------------------------------------- reading, writing
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_only_regular_files_are_read(tmp_path, kind):
    """Others have no end, or nobody writes them: reading would wait for ever."""
    from cs336_systems.measure.memory import timeline
    from cs336_systems.measure.trace import condensed, overlap
    from cs336_systems.training import config, documents, text, tokens

    def place(name):
        path = tmp_path / name
        os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
        return path

    source = config.load(None, {"text.source": str(place("a.txt"))}).text
    for read in (
        lambda: files.read_text(place("a.csv")), lambda: files.read_json(place("a.json")),
        lambda: config.load(place("b.json")), lambda: config.load(place("a.toml")),
        lambda: text.prepare(source, tmp_path / "text"), lambda: documents.opened(tmp_path / "a.txt"),
        lambda: condensed.Step.from_json(place("c.json")), lambda: overlap.from_json(place("d.json")),
        lambda: timeline.Timeline.from_json(place("e.json")),
        lambda: tokens.load_tokenizer(place("tokenizer.json")), lambda: files.sha256(place("weights")),
    ):  # fmt: skip
        with pytest.raises((ValueError, OSError), match="not a regular file"):
            read()


def test_the_error_of_a_cleanup_hides_nothing(tmp_path, monkeypatch):
    """On a disk that is read-only even the removal of what is not there fails."""

    def refused(*arguments, **options):
        raise OSError(files.errno.EROFS, "Read-only file system")

    monkeypatch.setattr(files, "open", refused, raising=False)
    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(StoreError, match=f"^cannot write into {tmp_path}: Read-only file system$"):
        files.replace({tmp_path / "rows.csv": "text"})
