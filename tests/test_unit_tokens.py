"""Tokens: lossless, the same for any number of processes, of the right width; the stage is taken by content."""

import dataclasses
import json
import math
import os
import secrets
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from cs336_systems.training import documents, outputs, pipeline, text, tokens
from cs336_systems.training.config import Generation, load

MARK = documents.END_OF_TEXT


def settings(**keys):
    return load(None, {f"tokenizer.{key}": value for key, value in keys.items()}).tokenizer


def unicode(rng, length):
    """Any characters that UTF-8 can have, and what tokenizers stumble on."""
    hard = [
        MARK, "<|", "\r\n", "\n\n", "  ", " \u00a0", "\u3000", "e\u0301", "👩\u200d👧", "'s", "\x00", "\ufeff",
    ]  # fmt: skip
    kinds = [
        lambda: chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])),
        lambda: rng.choice(hard), lambda: rng.choice("aeiou tnsr"), lambda: chr(rng.randrange(128)),
    ]  # fmt: skip
    return "".join(rng.choice(kinds)() for _ in range(length))


def prose(rng, length):
    words = ["the", "fox", "ran", "blue", "river", "Lily's", "said,", "and", "then.", "42", "naïve", "–"]
    return " ".join(rng.choice(words) for _ in range(length))


@pytest.fixture
def prepare(tmp_path):
    """Tokens of documents; a folder of its own for each call, unless `out` says which."""

    def prepare(told, out=None, log=None, train_mb=0, valid_mb=0.5, **keys):
        source = tmp_path / "source.txt"
        source.write_bytes(b"".join(document.encode() + documents.END for document in told))
        out = out or tmp_path / secrets.token_hex(4)
        limits = {"text.train_mb": train_mb, "text.valid_mb": valid_mb}
        chosen = load(None, {"text.source": str(source), **limits})
        info = text.prepare(chosen.text, out / "text", log=lambda line: None)
        log = [] if log is None else log
        return info, tokens.prepare(settings(**keys), info, out / "tokens", log.append)

    return prepare


def documents_of(info, ids):
    """The texts behind an array of token ids."""
    tokenizer = tokens.load_tokenizer(info.tokenizer)
    ends = np.flatnonzero(ids == info.end_of_text)
    assert ends[-1] == len(ids) - 1, "each document is ended"
    pieces = np.split(ids, ends[:-1] + 1)
    return [tokenizer.decode(piece[:-1].tolist()) for piece in pieces]


# ------------------------------------------------------------------------------------------------------------- lossless
def test_a_tokenizer_reads_no_end_of_text_out_of_a_text(prepare, rng):
    _, info = prepare([prose(rng, 50) for _ in range(20)], vocab_size=300)
    tokenizer = tokens.load_tokenizer(info.tokenizer)
    assert tokenizer.token_to_id(MARK) == info.end_of_text
    for _ in range(50):
        any_text = unicode(rng, rng.randrange(40))
        ids = tokenizer.encode(any_text, add_special_tokens=False).ids
        assert info.end_of_text not in ids and tokenizer.decode(ids) == any_text
    assert tokenizer.decode([info.end_of_text]) == ""
    assert tokenizer.decode([info.end_of_text], skip_special_tokens=False) == MARK


# --------------------------------------------------------------------------------------------------------------- blocks
def test_blocks_make_up_the_file(tmp_path, rng, monkeypatch):
    """Blocks of all sizes, ends of documents at all places in them."""
    for size in (20, 33, 64, 1000):
        monkeypatch.setattr(documents, "_BLOCK", size)
        told = ["x" + unicode(rng, rng.randrange(60)).replace(MARK, "|") + "." for _ in range(200)]
        file = tmp_path / "train.txt"
        file.write_bytes(b"".join(document.encode() + documents.END for document in told))
        blocks = list(documents.blocks(file))
        assert b"".join(blocks) == file.read_bytes()
        assert all(0 < len(block) < size + len(documents.END) for block in blocks)
        whole, last = [], ""
        for block in blocks:
            first, *rest = documents.texts(block)
            whole += [last + first, *rest] if rest else []
            last = whole.pop() if rest else last + first
        assert whole == told and last == ""


@pytest.mark.parametrize("kind", [prose, unicode])
def test_a_long_document_is_cut_where_no_token_is(prepare, rng, monkeypatch, kind):
    told = [kind(rng, 3000).replace(MARK, "|") + " \n ." for _ in range(4)]
    _, info = prepare(told, vocab_size=400, valid_mb=0.001)
    monkeypatch.setattr(documents, "_BLOCK", 1000)
    _, cut = prepare(told, vocab_size=400, valid_mb=0.001, path=str(info.tokenizer))
    whole = documents_of(cut, cut.train)
    assert len(whole) == 3 and whole == [document for document in told if document in whole]
    if kind is prose:
        assert np.array_equal(cut.train, info.train)


def test_blocks_and_threads_make_no_difference(prepare, rng, monkeypatch):
    told = [kind(rng, rng.randrange(1, 400)).replace(MARK, "|") + "." for kind in (prose, unicode) * 20]
    _, info = prepare(told, vocab_size=350)
    assert isinstance(info.train, np.memmap)
    assert sorted(documents_of(info, info.train) + documents_of(info, info.valid)) == sorted(told)
    for size, at_once, threads in ((3000, 8, "true"), (3000, 1, "false"), (900, 3, "true")):
        monkeypatch.setattr(documents, "_BLOCK", size)
        monkeypatch.setattr(tokens, "_AT_ONCE", at_once)
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", threads)
        _, other = prepare(told, path=str(info.tokenizer))
        assert documents_of(other, other.train) == documents_of(info, info.train)
        assert documents_of(other, other.valid) == documents_of(info, info.valid)
        if size == 3000:
            assert np.array_equal(other.train, info.train)


# ------------------------------------------------------------------------------------------------------------- learning
def test_merges_shorten_the_text_until_there_are_no_more(prepare, rng):
    told = [prose(rng, 200) for _ in range(20)]
    log = []
    made = [prepare(told, log=log, vocab_size=size)[1] for size in (257, 270, 300)]
    counts = [len(info.train) + len(info.valid) for info in made]
    assert counts[0] == sum(len(document.encode()) + 1 for document in told)  # without merges, and with ends
    assert counts == sorted(counts, reverse=True) and len(set(counts)) == 3
    _, info = prepare([*told, "Xylophone", *told], log=log, vocab_size=2**32)
    known = tokens.load_tokenizer(info.tokenizer).get_vocab()
    assert info.vocab_size < 1000 and "Ġriver" in known and "Xylophone" not in known, "it comes but once"
    assert f"{info.vocab_size:,} (4,294,967,296 asked for)" in log[-1]


def test_a_part_of_a_long_text_is_learned_from(prepare, rng, monkeypatch):
    """Evenly spread: of two halves in other letters both are known."""
    told = ["abab" * 200] * 50 + ["xyxy" * 200] * 50
    monkeypatch.setattr(documents, "_BLOCK", 2000)
    monkeypatch.setattr(tokens, "_LEARN_FROM", 20_000)
    seen = []
    read, encode = documents.texts, tokens._encoded
    monkeypatch.setattr(documents, "texts", lambda block: seen.append(block) or read(block))
    monkeypatch.setattr(tokens, "_encoded", lambda *of: [seen.append(None), encode(*of)][1])
    _, info = prepare(told, vocab_size=262)
    seen = seen[: seen.index(None)]  # read to learn
    assert 15_000 <= sum(map(len, seen)) <= 25_000
    known = tokens.load_tokenizer(info.tokenizer).get_vocab()
    assert {"ab", "xy"} <= set(known)


@pytest.mark.parametrize("letter", ["a", " ", "é"])
def test_words_are_learned_up_to_a_length(prepare, letter):
    """For learning takes the square of it."""
    _, info = prepare([f".{letter * 20_000}."] * 2, vocab_size=300)
    longest = max(map(len, tokens.load_tokenizer(info.tokenizer).get_vocab()))
    assert longest == 256 * len(letter.encode())
    assert documents_of(info, info.train) == [f".{letter * 20_000}."]


# ------------------------------------------------------------------------------------------------------ given tokenizer
def byte_level(path, special=(MARK,), more=0):
    """A tokenizer.json of somebody else's making: bytes alone, in another order, end of text last."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([f"<extra {n}>" for n in range(more)])
    tokenizer.add_special_tokens(list(special))
    tokenizer.enable_truncation(10)
    tokenizer.enable_padding(length=20)
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("more, dtype", [(2**16 - 257, "<u2"), (2**16 - 256, "<u4")])
def test_ids_are_as_wide_as_the_vocabulary(prepare, rng, tmp_path, more, dtype):
    told = [prose(rng, 20) for _ in range(4)]
    given = byte_level(tmp_path / "given.json", more=more)
    _, info = prepare(told, path=str(given), vocab_size=999)
    assert info.tokenizer.read_bytes() == given.read_bytes()
    assert info.train.dtype == np.dtype(dtype) and info.end_of_text == info.vocab_size - 1 == 256 + more
    assert sorted(documents_of(info, info.train) + documents_of(info, info.valid)) == sorted(told)


@pytest.mark.parametrize("asked, special, separator", [
    ("", ["</s>"], "</s>"), ("", ["<s>", "<eos>"], "<eos>"), ("", ["</s>", MARK], MARK), ("", ["<bos>"], None),
    ("<bos>", ["<bos>", MARK], "<bos>"), ("<none>", [MARK], None),
])  # fmt: skip
def test_documents_are_separated_as_the_tokenizer_has_it(prepare, rng, tmp_path, asked, special, separator):
    told = [prose(rng, 9) + " </s> <eos>" for _ in range(20)]
    given = byte_level(tmp_path / "given.json", special=special)
    make = lambda: prepare(told, path=str(given), separator=asked)[1]
    if separator is None:
        with pytest.raises(ValueError, match=rf"tokenizer\.separator names .* such as {special[0]}"):
            make()
        return
    info = make()
    assert info.end_of_text == 256 + special.index(separator)
    for ids in (info.train, info.valid):
        ends = np.flatnonzero(ids == info.end_of_text)
        assert ends[-1] == len(ids) - 1 and set(ids.tolist()) & {256, 257} == {info.end_of_text}
    assert (info.train == info.end_of_text).sum() + (info.valid == info.end_of_text).sum() == 20


@pytest.mark.parametrize("make, why", [
    (lambda path: None, "No such file"),
    (lambda path: path.write_text("{}"), "no tokenizer.json"),
    (lambda path: path.write_text('{"version": "1.0", "model"'), "no tokenizer.json"),
    (lambda path: path.write_bytes(b"\xff\xfe"), "no tokenizer.json"),
    (lambda path: path.mkdir(), "no tokenizer.json"),
    (lambda path: byte_level(path, special=["<bos>"]), r"has no token <\|endoftext\|>; tokenizer\.separator"),
], ids=["missing", "other JSON", "cut off", "binary", "folder", "no end of text"])  # fmt: skip
def test_what_is_no_tokenizer_is_refused_by_name(prepare, tmp_path, make, why):
    path = tmp_path / "given.json"
    make(path)
    with pytest.raises(ValueError, match=why) as caught:
        prepare(["some", "text"], path=str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------------ the stage
def test_what_was_made_from_the_same_is_taken(prepare, rng, tmp_path):
    told, log, out = [prose(rng, 60) for _ in range(30)], [], tmp_path / "out"
    more, given = [*told, "more"], byte_level(tmp_path / "given.json")
    made = lambda told, **keys: prepare(told, out, log, **keys)[1]
    info = made(told, vocab_size=300)
    same = made(told, vocab_size=300)
    assert np.array_equal(info.train, same.train) and info.vocab_size == same.vocab_size
    made(told, vocab_size=301)
    made(more, vocab_size=301)
    made(more, path=str(given))
    os.utime(given, (1, 1))
    made(more, path=str(given))
    (out / "tokens" / "valid.bin").write_bytes(b"")
    assert len(made(more, path=str(given)).valid) > 0
    verbs = [line.split()[1] for line in log if not line.startswith("tokens: learning")]
    assert verbs == ["made", "took", "made", "made", "made", "took", "made"]
    assert not outputs.first_wrong(
        out / "tokens", json.loads((out / "tokens" / "tokens.json").read_text())["files"]
    )


def test_what_is_known_of_the_tokens(prepare, rng, tmp_path):
    """The entropy of a text, as the text stage tells it of stories, is spread over its tokens."""
    text_info, info = prepare([prose(rng, 60) for _ in range(30)], vocab_size=300)
    about = json.loads((info.tokenizer.parent / "tokens.json").read_text())
    assert about["counts"] == {"train": len(info.train), "valid": len(info.valid)}
    assert info.valid_bytes == sum(len(document.encode()) for document in documents_of(info, info.valid))
    assert info.floor is None
    known = dataclasses.replace(text_info, valid=dataclasses.replace(text_info.valid, nats=123.0))
    info = tokens.prepare(settings(vocab_size=300), known, tmp_path / "tokens", lambda line: None)
    assert info.floor == pytest.approx(123.0 / len(info.valid))


@pytest.mark.parametrize("name", ["train.bin", "valid.bin", "tokenizer.json", "../text/valid.txt"])
def test_a_byte_that_has_changed_is_refused(prepare, rng, tmp_path, name):
    """A file of the right size is no right file."""
    told, out = [prose(rng, 60) for _ in range(30)], tmp_path / "out"
    prepare(told, out, vocab_size=300)
    file = (out / "tokens" / name).resolve()
    content = file.read_bytes()
    file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    with pytest.raises(ValueError, match=f"{file.name} has been altered"):
        prepare(told, out, vocab_size=300)


@pytest.mark.parametrize("change", [{"dtype": "junk"}, {"files": None}, {"lossless": None}], ids=str)
def test_a_record_of_tokens_that_is_none_is_refused_in_a_line(tmp_path, change):
    draw(tmp_path)
    about = tmp_path / "tokens" / "tokens.json"
    told = json.loads(about.read_text()) | change
    about.write_text(
        json.dumps(
            {name: value for name, value in told.items() if value is not None or name == "end_of_text"}
        )
    )
    if "files" in change:
        draw(tmp_path)  # made anew
        return
    with pytest.raises(ValueError, match=r"tokens\.json is damaged") as caught:
        draw(tmp_path)
    assert "\n" not in str(caught.value)


def losing(kind):
    """Tokenizers of other making that do not keep every character, and one that keeps those of ASCII."""
    letters = {chr(code): code - 32 for code in range(32, 127)} | {MARK: 95}
    if kind == "lower":
        tokenizer = Tokenizer.from_file(str(byte_level(Path("lower.json"))))
        tokenizer.normalizer = normalizers.Lowercase()
        return tokenizer
    if kind == "words":
        tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "fox": 1, MARK: 2}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    else:
        tokenizer = Tokenizer(models.BPE(letters if kind == "ASCII" else {"e": 0, "f": 1, MARK: 2}, []))
        tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([MARK])
    return tokenizer


@pytest.mark.parametrize("kind", ["lower", "words", "letters", "ASCII"])
def test_tokens_that_are_not_all_of_the_text_have_no_bits_a_byte(tmp_path, prepare, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    losing(kind).save("losing.json")
    log, out = [], tmp_path / "out"
    text_info, info = prepare(["The fox ran.", "A fox. Then", "fox"] * 20, out, log, path="losing.json")
    assert (info.valid_bytes is None) == (kind != "ASCII")
    assert any("no bits a byte" in line for line in log) == (kind != "ASCII")
    known = dataclasses.replace(text_info, valid=dataclasses.replace(text_info.valid, nats=9.0))
    again = lambda: tokens.prepare(settings(path="losing.json"), known, out / "tokens", lambda line: None)
    assert (again().floor is None) == (kind != "ASCII")


def test_merges_are_not_left_out_at_random(tmp_path, prepare):
    _, info = prepare(["hello hello world"] * 40, vocab_size=300)
    told = json.loads(info.tokenizer.read_text())
    told["model"]["dropout"] = 0.5
    (tmp_path / "random.json").write_text(json.dumps(told))
    same, at_random = map(tokens.load_tokenizer, (info.tokenizer, tmp_path / "random.json"))
    expected = same.encode("hello world").ids
    assert all(at_random.encode("hello world").ids == expected for _ in range(30))


# ------------------------------------------------------------------------------------------------------- random tokens
def draw(folder, seed=0, vocab_size=1024, train_mb=0.2, valid_mb=0.02):
    keys = {"text.source": "random", "text.seed": seed, "text.train_mb": train_mb, "text.valid_mb": valid_mb}
    info = text.prepare(load(None, keys).text, folder / "text", lambda line: None)
    return tokens.prepare(settings(vocab_size=vocab_size), info, folder / "tokens", lambda line: None)


def test_random_tokens_are_uniform_and_repeatable(tmp_path, monkeypatch, rng):
    seed = rng.randrange(1000)
    info = draw(tmp_path / "a", seed)
    assert (len(info.train), len(info.valid)) == (100_000, 10_000)
    counts = np.bincount(info.train, minlength=1024)
    assert len(counts) == 1024 and counts.min() > 40 and counts.max() < 180  # 98 on average
    assert info.floor == math.log(1024) and info.valid_bytes == info.valid.nbytes
    assert info.tokenizer is None and info.end_of_text is None and not (tmp_path / "a" / "text").exists()
    assert not np.array_equal(info.train[:1000], info.valid[:1000])
    assert not np.array_equal(info.train, draw(tmp_path / "b", seed + 1).train)
    assert np.array_equal(info.train, draw(tmp_path / "c", seed).train)


@pytest.mark.parametrize("vocab_size, dtype", [(2**16, "<u2"), (2**16 + 1, "<u4"), (2**32, "<u4")])
def test_random_tokens_reach_the_whole_vocabulary(tmp_path, vocab_size, dtype):
    info = draw(tmp_path, vocab_size=vocab_size, train_mb=1)
    assert info.train.dtype == np.dtype(dtype) and len(info.train) == 10**6 // info.train.itemsize
    assert 0.99 * vocab_size < int(info.train.max()) < vocab_size


# -------------------------------------------------------------------------------------------------------- ready tokens
def take(folder, ids, valid=(1, 2, 3), kind="npy", stored="uint16", train_mb=0, **keys):
    for name, told in (("train", ids), ("valid", valid)):
        array = np.asarray(told, stored)
        np.save(folder / f"{name}.npy", array) if kind == "npy" else array.tofile(folder / f"{name}.bin")
    files = {key: str(folder / f"{name}.{kind}") for key, name in (("source", "train"), ("valid", "valid"))}
    chosen = load(None, {f"text.{key}": value for key, value in files.items()} | {"text.train_mb": train_mb})
    info = text.prepare(chosen.text, folder / "text", lambda line: None)
    return tokens.prepare(settings(**keys), info, folder / "out", lambda line: None)


@pytest.mark.parametrize(
    "kind, stored", [("npy", "int64"), ("npy", "uint16"), ("bin", "uint16"), ("bin", "int32")]
)
def test_ready_tokens_are_taken_as_they_are(tmp_path, rng, kind, stored):
    told = [rng.randrange(400) for _ in range(3000)]
    keys = {"kind": kind, "stored": stored, "vocab_size": 400, "dtype": stored if kind == "bin" else "uint32"}
    info = take(tmp_path, told, **keys)
    assert (
        info.train.tolist() == told
        and info.valid.tolist() == [1, 2, 3]
        and info.train.dtype == np.dtype("<u2")
    )
    assert info.vocab_size == 400 and info.tokenizer is info.end_of_text is info.valid_bytes is None
    assert info.files.keys() == {"train.bin", "valid.bin"} and info.floor is None
    few = take(tmp_path, told, **keys, train_mb=0.001)
    assert few.train.tolist() == told[: 1000 // np.dtype(stored).itemsize]
    assert take(tmp_path, [3, *told[1:]], **keys).train[0] == 3, "another content"
    given = byte_level(tmp_path / "given.json", more=200)
    info = take(tmp_path, told, **keys | {"path": str(given)})
    assert (
        info.vocab_size == 457
        and info.end_of_text == 456
        and info.tokenizer.read_bytes() == given.read_bytes()
    )


def test_ids_of_32_bits_are_not_read_as_more_of_16(tmp_path, rng):
    told = [rng.randrange(400) for _ in range(300)]
    with pytest.raises(ValueError, match=r"0 in every other place.*tokenizer\.dtype"):
        take(tmp_path, told, kind="bin", stored="uint32", vocab_size=400, dtype="uint16")


def test_another_separator_is_another_end_of_ready_tokens(tmp_path):
    given = byte_level(tmp_path / "given.json", special=["</s>", "<bos>"])
    for separator, end in (("", 256), ("<bos>", 257), ("</s>", 256)):
        assert take(tmp_path, range(258), path=str(given), separator=separator).end_of_text == end


def test_ready_tokens_that_are_none_are_refused_by_name(tmp_path):
    for told, stored, why in (
        ([1, 300], "int64", "train.npy holds id 300; the vocabulary has 300"),
        ([1, -1], "int64", "train.npy holds id -1"), ([[1, 2]], "int64", r"of shape \(1, 2\)"),
        ([0.5], "float32", "holds float32"), ([], "int64", "train.npy holds no ids"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            take(tmp_path, told, stored=stored, vocab_size=300)
    with pytest.raises(ValueError, match=r"train.bin holds no array of int32 ids"):
        take(tmp_path, [3, 2, 1], kind="bin", dtype="int32")
    with pytest.raises(ValueError, match=r"holds valid.npy, which text.source=.* has, too"):
        take(tmp_path, [1, 2, 3])
    np.save(tmp_path / "train.npy", np.array([{}], object))
    for source, valid in (("train.npy", "valid.npy"), ("train.npy", ""), ("none.npy", "valid.npy")):
        keys = {"text.source": str(tmp_path / source), "text.valid": valid and str(tmp_path / valid)}
        with pytest.raises(ValueError, match=r"holds no array of ids|ready tokens are two files"):
            info = text.prepare(load(None, keys).text, tmp_path / "text", lambda line: None)
            tokens.prepare(settings(), info, tmp_path / "out", lambda line: None)


def test_a_regex_that_gives_up_is_told_in_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_BLOCK", 1000)
    made = Tokenizer(models.BPE({MARK: 0, "x": 1}, []))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    made.save(str(tmp_path / "made.json"))
    source = tmp_path / "source.txt"
    source.write_text(f"\n{MARK}\n".join("x" * 500 for _ in range(40)))
    chosen = load(None, {"text.source": str(source), "tokenizer.path": str(tmp_path / "made.json")})
    found = text.prepare(chosen.text, tmp_path / "text", lambda line: None)
    with pytest.raises(ValueError, match="the tokenizer fails at the text"):
        tokens.prepare(chosen.tokenizer, found, tmp_path / "tokens", lambda line: None)


@pytest.mark.parametrize("model", [models.WordLevel, models.WordPiece])
def test_a_tokenizer_that_lacks_a_word_is_told_in_a_line(tmp_path, prepare, model):
    made = Tokenizer(model({MARK: 0, "the": 1, "fox": 2}))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "made.json"))
    _, info = prepare(["the fox"] * 20, path=str(tmp_path / "made.json"))
    assert info.train[:3].tolist() == [1, 2, 0]
    with pytest.raises(ValueError, match=r"the tokenizer fails at the text: .*UNK"):
        prepare(["the dog"] * 20, path=str(tmp_path / "made.json"))
    with pytest.raises(ValueError, match=r"the tokenizer fails at the text: .*UNK"):
        next(pipeline.spoken(None, made, 0, ["the", "the dog"], Generation()))
