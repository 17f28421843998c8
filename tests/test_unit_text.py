"""Sources of text: documents, limits, what is held out; the stage is taken by content, and whole or not there."""

import codecs
import hashlib
import inspect
import itertools
import json
import os
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cs336_systems.store import files
from cs336_systems.training import documents, text
from cs336_systems.training import stories as teller
from cs336_systems.training.config import load

MARK = documents.END_OF_TEXT


def settings(**keys):
    return load(None, {f"text.{key}": value for key, value in keys.items()}).text


def prepare(folder, log=None, **keys):
    """The text's two lists of documents, and what is known of it."""
    info = text.prepare(settings(**keys), folder, log=(log if log is not None else []).append)
    read = [split.path.read_bytes().split(documents.END) for split in (info.train, info.valid)]
    assert all(found.pop() == b"" for found in read), "a document without its end"
    for found, split in zip(read, (info.train, info.valid), strict=True):
        assert (split.documents, split.bytes) == (len(found), sum(map(len, found)))
        assert split.sha256 == hashlib.sha256(split.path.read_bytes()).hexdigest()
    return [[document.decode() for document in found] for found in read], info


@pytest.fixture
def stories(tmp_path, monkeypatch):
    """A stand-in for the stories: story n of a seed is `seed n ` and some é, and has n % 7 nats; `calls` of it."""
    calls, file = [], tmp_path / "stories.py"
    file.write_text("# a teller\n")
    file.with_suffix(".txt").write_text("a grammar\n")

    def told(seed, start, each):
        calls.append(start)
        for n in itertools.count(start):
            yield teller.Story(f"{seed} {n} {'é' * (n % 30)}", float(n % 7))

    monkeypatch.setattr(teller, "stories", told)
    monkeypatch.setattr(teller, "__file__", str(file))
    return types.SimpleNamespace(calls=calls, file=file)


# -------------------------------------------------------------------------------------------------------------- stories
def test_stories_are_documents_with_their_entropy(tmp_path, stories):
    """And those held out do not depend on how many are learned from."""
    (train, valid), info = prepare(tmp_path / "a", source="stories", train_mb=0.002, valid_mb=0.001, seed=5)
    indices = [[int(story.split()[1]) for story in told] for told in (train, valid)]
    for told, some in zip((train, valid), indices, strict=True):
        assert told == [f"5 {n} {'é' * (n % 30)}" for n in some]
    assert not set(indices[0]) & set(indices[1])
    assert 1_800 < info.train.bytes < 2_200 and 800 < info.valid.bytes < 1_200
    for split, told in zip((info.train, info.valid), indices, strict=True):
        assert split.nats == sum(n % 7 for n in told)
    # a last one that reaches the limit, lines with their ends
    assert 1_000 <= info.valid.bytes + info.valid.documents < 1_000 + len(f"{valid[-1]}\n".encode())
    (few, same), _ = prepare(tmp_path / "b", train_mb=0.001, valid_mb=0.001, seed=5)
    assert valid == same and train[: len(few)] == few and len(train) > len(few)


def test_stories_are_told_anew_when_their_teller_changes(tmp_path, stories):
    log = []
    for suffix, content in (
        (".py", "one"),
        (".py", "one"),
        (".py", "another"),
        (".txt", "one"),
        (".txt", "another"),
    ):
        stories.file.with_suffix(suffix).write_text(content)
        prepare(tmp_path / "out", log=log, source="stories", train_mb=0.001, valid_mb=0.001)
    assert [line.split()[1] for line in log] == ["made", "took", "made", "made", "made"]


# ---------------------------------------------------------------------------------------------------------------- files
def test_documents_end_at_the_mark_and_with_the_file(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "b.txt").write_bytes(f"second file\n{MARK}".encode() * 3)
    (source / "a.txt").write_bytes(
        f"{MARK}\none\n\ntwo\n{MARK}\n three {MARK}\r\nfour\r\n{MARK}{MARK} \n\t{MARK}\nfive\n".encode()
    )
    (source / "c.md").write_text("of another kind")
    (source / "d" / "e").mkdir(parents=True)
    (source / "d" / "e" / "f.txt").write_text("nested")
    (source / ".hidden").mkdir()
    (source / ".hidden" / "g.txt").write_text("hidden")
    (train, valid), _ = prepare(tmp_path / "out", source=str(source), train_mb=0)
    told = ["one\n\ntwo", " three ", "four", "five\n", *["second file"] * 3, "nested"]
    told.remove(valid[0])
    assert train == told and len(valid) == 1


def test_documents_of_lines_of_json(tmp_path, rng):
    source = tmp_path / "source.jsonl"
    told = [f"{n} " + "".join(rng.choices('abcé🙂\n "\\', k=30)) + "." for n in range(50)]
    lines = [json.dumps({"id": n, "text": text, "raw": f"raw {n}"}) for n, text in enumerate(told)]
    source.write_text("\n\n".join(lines), encoding="utf-8")
    (train, valid), _ = prepare(tmp_path / "a", source=str(source), train_mb=0)
    assert sorted(train + valid) == sorted(told) and 1 <= len(valid) <= 6
    (train, valid), _ = prepare(tmp_path / "b", source=str(source), train_mb=0, field="raw")
    assert sorted(train + valid) == sorted(f"raw {n}" for n in range(50))
    source.write_text(json.dumps({"text": f"one\n{MARK}\ntwo"}) + "\n" + json.dumps({"text": " \n"}))
    (train, valid), _ = prepare(tmp_path / "c", source=str(source), train_mb=0)
    assert sorted(train + valid) == ["one", "two"]
    for line in ("{", "[]", "3", "{}", '{"text": 3}', '{"text": "\\ud800"}', "[" * 100_000):
        source.write_text(f"{lines[0]}\n\n{line}\n")
        with pytest.raises(ValueError, match=r"source.jsonl, line 3: no JSON object with a text 'text'"):
            prepare(tmp_path / "d", source=str(source))


def test_a_byte_order_mark_is_no_text(tmp_path):
    source, mark = tmp_path / "source", codecs.BOM_UTF8
    source.mkdir()
    (source / "a.txt").write_bytes(mark + f"one\n{MARK}\ntwo".encode())
    (source / "b.txt").write_bytes(mark + b" \r\n")
    (source / "c.jsonl").write_bytes(mark + b'{"text": "three"}\r\n')
    (train, valid), _ = prepare(tmp_path / "out", source=str(source), train_mb=0)
    assert sorted(train + valid) == ["one", "three", "two"]


def test_what_is_held_out_is_drawn_by_the_seed(tmp_path):
    source = tmp_path / "source.txt"
    source.write_text(f"\n{MARK}\n".join(f"{n:04}" for n in range(2000)))
    held = [
        [int(one) for one in prepare(tmp_path / f"{seed}{again}", source=str(source), train_mb=0, seed=seed)[0][1]]
        for again in (0, 1) for seed in range(8)
    ]  # fmt: skip
    assert held[:8] == held[8:] and len(set(map(tuple, held))) == 8
    assert all(len(some) == 200 and some == sorted(some) for some in held)
    share = sum(n >= 1000 for some in held for n in some) / 3200
    assert 0.4 < share < 0.6, "of all parts of the text"


def test_no_copy_of_what_is_held_out_is_learned_from(tmp_path):
    source = tmp_path / "source.txt"
    source.write_text(f"\n{MARK}\n".join(f"{n % 400:04}" for n in range(1000)))
    for seed in range(4):
        (train, valid), _ = prepare(tmp_path / str(seed), source=str(source), train_mb=0, seed=seed)
        assert len(train) + len(valid) == 1000 and 95 <= len(valid) <= 100
        assert not set(train) & set(valid)
    source.write_text(f"\n{MARK}\n".join(f"{max(n, 300):04}" for n in range(1000)))
    for seed in range(20):  # one that makes up too much is passed over, whenever it is drawn
        assert len(prepare(tmp_path / f"much{seed}", source=str(source), train_mb=0, seed=seed)[0][1]) == 100
    for kinds in (1, 2):  # of which each is more than may be held out
        source.write_text(f"\n{MARK}\n".join(f"the same {n % kinds}" for n in range(40)))
        assert list(map(len, prepare(tmp_path / str(kinds), source=str(source), train_mb=0)[0])) == [36, 4]


def test_a_file_of_its_own_is_held_out(tmp_path):
    (tmp_path / "valid").mkdir()
    (tmp_path / "valid" / "a.jsonl").write_text('{"text": "held"}\n{"text": "out"}\n')
    (tmp_path / "train.txt").write_text(f"\n{MARK}\n".join(f"document {n}" for n in range(20)))
    keys = {"source": str(tmp_path / "train.txt"), "valid": str(tmp_path / "valid"), "train_mb": 0}
    (train, valid), _ = prepare(tmp_path / "out", **keys)
    assert train == [f"document {n}" for n in range(20)] and valid == ["held", "out"]
    (tmp_path / "valid" / "a.jsonl").write_text('{"text": "other"}\n')
    assert prepare(tmp_path / "out", **keys)[0][1] == ["other"]
    with pytest.raises(ValueError, match=r"text\.valid='/no/such'; allowed: a file or folder"):
        prepare(tmp_path / "out", source=keys["source"], valid="/no/such")
    with pytest.raises(ValueError, match="has a held-out text of its own"):
        prepare(tmp_path / "out", source="stories", valid=keys["valid"])
    with pytest.raises(ValueError, match=r"holds a\.jsonl, which text\.source=.* has, too"):
        prepare(tmp_path / "out", source=str(tmp_path), valid=keys["valid"])


def test_our_own_files_are_read_as_they_were_written(tmp_path, rng):
    source = tmp_path / "source.txt"
    pieces = ["a", "\n", "\r\n", "<", "|", MARK[:-1], "é", "🙂", " ", "endoftext"]
    wanted = [f"{n}" + "".join(rng.choices(pieces, k=rng.randrange(1, 30))) + "." for n in range(300)]
    source.write_bytes(b"".join(document.encode() + documents.END for document in wanted))
    (train, valid), info = prepare(tmp_path / "out", source=str(source), train_mb=0)
    assert sorted(train + valid) == sorted(wanted)
    again, _ = prepare(tmp_path / "again", source=str(info.train.path), train_mb=0)
    assert sorted(again[0] + again[1]) == sorted(train)
    assert train == [document for document in wanted if document in set(train)], "in their order"


@pytest.mark.parametrize("marked", [True, False], ids=["documents", "one document"])
def test_nothing_is_in_both_and_nothing_is_lost(tmp_path, rng, marked):
    source = tmp_path / "source.txt"
    letters = lambda: "".join(rng.choices("abcé🙂\n ", k=rng.randrange(200)))
    told = [f"{n} {letters()}" for n in range(rng.randrange(2, 99))]
    source.write_bytes((f"\n{MARK}\n" if marked else "").join(told).encode())
    (train, valid), info = prepare(tmp_path / "out", source=str(source), train_mb=0, valid_mb=0.001)
    if marked:
        assert sorted(train + valid) == sorted(told) and train and valid
    else:
        assert train + valid == ["".join(train + valid)[: len(train[0])], valid[0]]
        assert "".join(train + valid) == "".join(told)
    longest = max(len(document.encode()) for document in told)
    assert info.valid.bytes <= max(min(1000, source.stat().st_size / 10) + 4, longest)


@pytest.mark.parametrize("length", [100, 101, 102, 103])
def test_one_document_is_cut_between_characters(tmp_path, length):
    source = tmp_path / "source.txt"
    source.write_text("x" * (length - 100) + "🙂" * 1000, encoding="utf-8")
    (train, valid), _ = prepare(tmp_path / "out", source=str(source), train_mb=0, valid_mb=0.000_202)
    assert "".join(train + valid) == source.read_text(encoding="utf-8") and valid == ["🙂" * 50]


def test_limits_fall_between_documents_and_cut_one_that_is_longer(tmp_path):
    source = tmp_path / "source.txt"
    source.write_text(f"\n{MARK}\n".join(f"{n:03}" + "-" * 97 for n in range(100)))
    (train, valid), _ = prepare(tmp_path / "a", source=str(source), train_mb=0.00055, valid_mb=0.00032)
    held = {document[:3] for document in valid}
    first = [f"{n:03}" for n in range(8) if f"{n:03}" not in held]
    assert [document[:3] for document in train] == first[:5] and len(held) == 3
    source.write_text(f"{'é' * 5000}\n{MARK}\n{'é' * 5001}")
    long, _ = prepare(tmp_path / "b", source=str(source), train_mb=0.002_001, valid_mb=0.000_101)
    assert long == [["é" * 1000], ["é" * 50]]


def test_a_large_file_of_small_pieces_is_checked_across_them(tmp_path, rng):
    """A character that lies across two reads is none that is broken, and the place of one that is counts from the
    beginning of the file."""
    content = "ab🙂".encode() * 400_000
    source = tmp_path / "source.txt"
    source.write_bytes(content)
    (train, valid), _ = prepare(tmp_path / "out", source=str(source), train_mb=0)
    assert "".join(train + valid).encode() == content
    place = 6 * rng.randrange(300_000, 400_000) + 1
    source.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
    with pytest.raises(ValueError, match=f"byte {place} is 0xff"):
        prepare(tmp_path / "out", source=str(source), train_mb=0)


@pytest.mark.parametrize("make, named", [
    (lambda p: None, "allowed: stories, tinystories"),
    (lambda p: p.write_bytes(b""), "is empty"),
    (lambda p: p.write_bytes(b"good \xe9 bad"), "not UTF-8: byte 5"),
    (lambda p: p.write_bytes(b"cut \xe2\x82"), "not UTF-8: byte 4"),
    (lambda p: p.write_bytes("UTF-16".encode("utf-16")), "not UTF-8: byte 0"),
    (lambda p: p.write_text(" \n"), "too little text"),
    (lambda p: p.write_text("a"), "too little text"),
    (lambda p: p.mkdir(), r"without \*\.txt, \*\.jsonl"),
    (lambda p: (p / "folder.txt").mkdir(parents=True), r"without \*\.txt"),
], ids=["missing", "empty", "latin-1", "cut off", "utf-16", "blank", "one byte", "folder", "folder.txt"])  # fmt: skip
def test_a_text_that_is_none_is_refused_by_name(tmp_path, make, named):
    source = tmp_path / "named.txt"
    make(source)
    with pytest.raises(ValueError, match=named) as caught:
        prepare(tmp_path / "out", source=str(source))
    assert str(source) in str(caught.value)
    assert not list((tmp_path / "out").glob("*")) and not list((tmp_path / "out").glob(".*"))


def test_a_long_document_hides_neither_itself_nor_the_others(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name, count in (("a.TXT", 800), ("b.txt", 120_000), ("c.txt", 1000)):
        (source / name).write_bytes(b"0123456789" * count)
    for seed in range(6):
        (train, valid), _ = prepare(
            tmp_path / f"out{seed}", source=str(source), seed=seed, train_mb=1.0, valid_mb=0.5
        )
        assert max(map(len, valid)) <= 10_000 and sum(map(len, train)) == 1_000_000
    (train, _), _ = prepare(tmp_path / "all", source=str(source), train_mb=0.0, valid_mb=0.5)
    assert 1_200_000 in map(len, train)


@pytest.mark.parametrize("name", [".", "train.txt", ""])
def test_a_text_is_not_written_over_its_source_and_no_source_is_none(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.txt").write_text("precious")
    with pytest.raises(ValueError, match="which is to be written" if name else r"text\.source=''"):
        prepare(tmp_path, source=name)
    assert (tmp_path / "train.txt").read_text() == "precious"
    with pytest.raises(ValueError, match="which is to be written"):
        prepare(tmp_path / "runs" / "text", source=".")


# ------------------------------------------------------------------------------------------------------------ the stage
@pytest.fixture
def source(tmp_path):
    file = tmp_path / "source.txt"
    file.write_text(f"\n{MARK}\n".join(f"document {n}" for n in range(200)))
    return file


def test_content_decides_not_the_date(tmp_path, source):
    log = []
    made = lambda file, **keys: prepare(tmp_path / "out", log=log, source=str(file), train_mb=0, **keys)[0]
    made(source)
    os.utime(source, (1, 1))
    made(source)  # another date
    (tmp_path / "elsewhere").mkdir()
    source = source.rename(tmp_path / "elsewhere" / source.name)
    made(source)  # another place
    before = source.stat()
    source.write_text(source.read_text().replace("document 7", "document X"))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "document X" in made(source)[0]  # another content of the same date and size
    made(source, valid_mb=0.0001)
    assert [line.split()[1] for line in log] == ["made", "took", "took", "made", "made"]


@pytest.mark.parametrize("damage", [
    lambda out: (out / "train.txt").write_bytes((out / "train.txt").read_bytes()[:-1]),
    lambda out: (out / "valid.txt").unlink(),
    lambda out: (out / "text.json").write_text("[]"),
    lambda out: (out / "text.json").write_text("[" * 100_000),
    lambda out: (out / "text.json").unlink(),
], ids=["truncated", "gone", "foreign record", "deep record", "no record"])  # fmt: skip
def test_what_is_not_whole_is_made_anew(tmp_path, source, damage):
    log = []
    wanted, _ = prepare(tmp_path / "out", log=log, source=str(source), train_mb=0)
    damage(tmp_path / "out")
    assert prepare(tmp_path / "out", log=log, source=str(source), train_mb=0)[0] == wanted
    assert "made" in log[1]


def test_a_full_disk_leaves_what_there_was(tmp_path, source, monkeypatch):
    out = tmp_path / "out"
    prepare(out, source=str(source), train_mb=0.0001)  # of other settings
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full(told, path, limit):
        path.write_text("half a ")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(documents, "copy", full)
    with pytest.raises(files.StoreError, match=f"^cannot write {out}: No space left on device$"):
        prepare(out, source=str(source), train_mb=0)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    with pytest.raises(files.StoreError, match=f"cannot write into {source}/out: "):
        prepare(source / "out", source=str(source))


def test_what_a_killed_process_left_is_no_output(tmp_path, source):
    out = tmp_path / "out"
    wanted, _ = prepare(out, source=str(source), train_mb=0)
    (out / "text.json").unlink()
    (out / ".making").mkdir()
    (out / ".making" / "left.txt").write_text("half a ")
    (out / "train.txt").write_text("half a ")
    assert prepare(out, source=str(source), train_mb=0)[0] == wanted
    assert sorted(path.name for path in out.iterdir()) == ["text.json", "train.txt", "valid.txt"]


def test_an_interruption_between_the_files_leaves_no_record(tmp_path, source, monkeypatch):
    """The record is gone before the first file is replaced, and comes after the last."""
    out = tmp_path / "out"
    prepare(out, source=str(source), train_mb=0)
    replace = os.replace

    def interrupted(old, new):
        if Path(new).name == "valid.txt":
            raise KeyboardInterrupt
        replace(old, new)

    source.write_text(source.read_text().replace("document", "Document"))
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(out, source=str(source), train_mb=0)
    assert sorted(path.name for path in out.iterdir()) == ["train.txt", "valid.txt"]
    monkeypatch.undo()
    (train, valid), _ = prepare(out, source=str(source), train_mb=0)
    assert all(document.startswith("Document") for document in train + valid)


def test_two_at_once_make_it_once(tmp_path, stories, monkeypatch):
    pytest.importorskip("fcntl")
    told, log = teller.stories, []

    def slowly(*args):
        while not log:  # until the other one waits
            time.sleep(0.01)
        return told(*args)

    monkeypatch.setattr(teller, "stories", slowly)
    config = settings(train_mb=0.001, valid_mb=0.001)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(text.prepare, config, tmp_path / "out", log.append) for _ in range(2)]:
            done.result()
    verbs = [verb for line in log for verb in ("made", "took", "waiting") if verb in line]
    assert sorted(verbs) == ["made", "took", "waiting"] and len(log) == 3 and len(stories.calls) == 2


def test_a_cache_holds_several_texts(tmp_path, source, stories):
    log, own = [], {"source": str(source)}
    for keys in (own, {}, {"seed": 1}, own, {"seed": 1}):
        prepare(tmp_path, log=log, train_mb=0.001, valid_mb=0.001, cache=str(tmp_path), **keys)
    assert [line.split()[1] for line in log] == ["made", "made", "made", "took", "took"]
    assert len(list(tmp_path.glob("*/text.json"))) == 3


# -------------------------------------------------------------------------------------------------- the hub, a stand-in
TRAIN, VALID = (f"TinyStoriesV2-GPT4-{name}.txt" for name in ("train", "valid"))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """In place of the package's function that fetches a file, one of the same arguments: files are links to blobs, as
    in the hub's own cache. `asked`: the names of files; `failing`: what it raises."""
    package = pytest.importorskip("huggingface_hub")
    hub = types.SimpleNamespace(asked=[], failing=None)
    hub.train = [f"A story, number {n}. " + "Café. " * 25 + "The end." for n in range(1500)]
    hub.valid, between = ["One held out.", "Another\n\none."], f"\n{MARK}\n"
    (tmp_path / "hub").mkdir()
    for name, content in (
        (TRAIN, "\n" + between.join(hub.train)), (VALID, between.join(hub.valid) + between),
    ):  # fmt: skip
        (blob := tmp_path / f"{len(content):064}").write_text(content, encoding="utf-8")
        (tmp_path / "hub" / name).symlink_to(blob)
    signature = inspect.signature(package.hf_hub_download)

    def hf_hub_download(*arguments, **named):
        told = signature.bind(*arguments, **named).arguments
        hub.asked.append(told["filename"])
        assert told == {"repo_id": text.REPOSITORY, "filename": hub.asked[-1], "repo_type": "dataset"}
        if hub.failing:
            raise hub.failing
        return str(tmp_path / "hub" / told["filename"])

    monkeypatch.setattr(package, "hf_hub_download", hf_hub_download)
    return hub


def test_tinystories_come_from_the_hub(tmp_path, hub):
    log = []
    keys = {"source": "tinystories", "log": log}
    (train, valid), _ = prepare(tmp_path / "out", **keys, train_mb=0)
    assert train == ["\n" + hub.train[0], *hub.train[1:]] and valid == hub.valid
    prepare(tmp_path / "out", **keys, train_mb=0)
    assert hub.asked == [TRAIN, VALID], "once: the second time nothing is needed"
    (few, _), _ = prepare(tmp_path / "other", **keys, train_mb=0.1)
    assert few == train[: len(few)] != train
    assert [line.split()[1] for line in log] == ["made", "took", "made"]


def test_tinystories_without_the_hub_say_so_in_a_line(tmp_path, hub):
    hub.failing = ConnectionError("\nrefused\nby whom")
    says = rf"^text\.source='tinystories': {TRAIN} cannot be fetched: ConnectionError: refused; --source FILE[^\n]*$"
    with pytest.raises(ValueError, match=says):
        prepare(tmp_path / "out", source="tinystories")
    assert not (tmp_path / "out").exists()


def test_tinystories_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="huggingface_hub"):
        prepare(tmp_path / "out", source="tinystories")
