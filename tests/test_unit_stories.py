"""Stories: the same bytes everywhere, probabilities that a reader finds in the text alone, English that agrees."""

from __future__ import annotations

import hashlib
import math
import random
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from waiting import running, wait_until

from cs336_systems.training import stories
from cs336_systems.training.stories import TABLES, Table, story, tell, write


@pytest.fixture(scope="module")
def thousand():
    return list(stories.stories(0, 0, 1000))


class Choice(Exception):
    pass


def go_on(state, chosen=None):
    """Takes alternative `chosen` where a story stands and tells on to its next choice: state, what it says, table."""
    todo, bound, drawn = state[0][:], dict(state[1]), {name: words[:] for name, words in state[2].items()}
    said, ahead, at = [], [chosen] * (chosen is not None), None

    def choose(table):
        nonlocal at
        if ahead:
            return ahead.pop()
        at = table
        raise Choice

    try:
        tell(choose, todo, bound, drawn, said)
    except Choice:
        return (todo, bound, drawn), "".join(said), at
    return (todo, bound, drawn), "".join(said) + "\n", None


def beginnings(texts):
    """Those that others begin with: in order, they stand right before one of these."""
    return [one for one, other in pairwise(sorted(texts)) if other.startswith(one)]


def start():
    return go_on(([TABLES["story"]], {}, {}))


def branches(state, table):
    """What each alternative leads to; none may say what another's text begins with, so that a reader can tell them."""
    after = {k: go_on(state, k) for k, weight in enumerate(table.weights) if weight}
    assert not beginnings(said for _, said, _ in after.values())
    return after


def read(text):
    """-log p of each choice, from the text alone."""
    text += "\n"
    (state, said, table), at, nats = start(), 0, []
    while table:
        assert text.startswith(said, at)
        at += len(said)
        after = branches(state, table)
        [chosen] = [k for k, (_, said, _) in after.items() if text.startswith(said, at)]
        nats.append(table.nats[chosen])
        state, said, table = after[chosen]
    assert text[at:] == said
    return nats


def texts(state, said, table, p=1.0):
    """All texts of a story that stands at a choice, with their probabilities as products of weights."""
    if table is None:
        yield said, p
        return
    for k, after in branches(state, table).items():
        q = p * table.weights[k] / sum(table.weights)
        yield from ((said + rest, r) for rest, r in texts(*after, q))


def nested(table):
    yield table
    for steps in table.steps:
        for step in steps:
            if isinstance(step, Table):
                yield from nested(step)


def test_the_bytes_never_change(thousand):
    digest = hashlib.sha256("\n".join(one.text for one in thousand).encode()).hexdigest()
    assert digest == "bb9059b79ee6aa09a7294c54647e71ea17e675ec8464c6a50fefa6e5d5795400"
    assert math.fsum(one.nats for one in thousand) == pytest.approx(77105.25683039546, rel=1e-9)


def test_a_story_depends_on_seed_and_index_alone(thousand):
    assert story(0, 999) == thousand[999]
    assert list(stories.stories(0, 17, 3)) == thousand[17:20]
    assert len({one.text for one in thousand}) == 1000
    assert not {one.text for one in stories.stories(1, 0, 1000)} & {one.text for one in thousand}


def test_a_reader_finds_the_probability_in_the_text(thousand):
    for one in thousand[:100]:
        assert math.fsum(read(one.text)) == pytest.approx(one.nats, rel=1e-12)
    with pytest.raises(ValueError):
        read(thousand[0].text.replace(" who ", " which "))


def test_every_choice_shows_before_the_next():
    """At each table of the grammar, in states that walks come to which take unlikely ways as often as likely ones."""
    walk, seen = random.Random(2), set()
    for _ in range(400):
        state, _, table = start()
        while table:
            seen.add(id(table.steps))
            state, _, table = walk.choice(list(branches(state, table).values()))
    tables = [part for table in TABLES.values() for part in nested(table)]
    assert [part for part in tables if len(part.steps) > 1 and id(part.steps) not in seen] == []


def test_probabilities_of_a_small_grammar(monkeypatch):
    """All its texts, by hand."""
    tables = stories._tables(
        "story: {x:pet} and {an y:pet}<end.x>; pet = owl fox/foxes; kid = Mia~ Tom; end: .|3*!\n"
        "end > fox: [, two {y.s}{z=cat}, {an z}.|{z=x} and {an z}.{-h:kid} {h} saw\n {h.self}. {h.He} ran.]\n"
    )
    monkeypatch.setattr(stories, "TABLES", tables)
    first, second = 2520 // 8, 2520 // 9  # weights of words
    owl, fox = first / (first + second), second / (first + second)
    expected = {
        "owl and a fox.\n": owl / 4,
        "owl and a fox!\n": owl * 3 / 4,
        "fox and an owl, two owls, a cat.\n": fox / 2,
        "fox and an owl and a fox. Mia saw herself. She ran.\n": fox / 2 * owl,
        "fox and an owl and a fox. Tom saw himself. He ran.\n": fox / 2 * fox,
    }
    assert dict(texts(*go_on(([tables["story"]], {}, {})))) == pytest.approx(expected)
    assert math.fsum(expected.values()) == pytest.approx(1)


def test_entropy_is_that_of_the_choices(thousand):
    """The mean of -log p against the mean of the entropies of the choices on the way, which never looks at -log p."""
    walk, sums = random.Random(3), []

    def choose(table):
        p = [weight / sum(table.weights) for weight in table.weights]
        sums[-1] -= sum(q * math.log(q) for q in p if q)
        return walk.choices(range(len(p)), p)[0]

    for _ in range(1000):
        sums.append(0.0)
        tell(choose, [TABLES["story"]], {}, {}, [])
    nats = [one.nats for one in thousand]
    error = statistics.stdev(nats) / math.sqrt(1000)
    assert abs(statistics.fmean(nats) - statistics.fmean(sums)) < 6 * error < 0.1 * statistics.fmean(nats)


@pytest.mark.parametrize("workers", [1, 2])
def test_files_do_not_depend_on_the_number_of_processes(tmp_path, workers):
    path, num_bytes = tmp_path / "text", 900_000  # three blocks
    total = write(path, 3, 40, num_bytes, workers)
    lines = path.read_text("ascii").splitlines(keepends=True)
    expected = list(stories.stories(3, 40, total.stories))
    assert lines == [one.text + "\n" for one in expected]
    assert total.bytes == path.stat().st_size
    assert total.bytes - len(lines[-1]) < num_bytes <= total.bytes
    assert total.nats == pytest.approx(math.fsum(one.nats for one in expected), rel=1e-12)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda path: story(-1, 0), "-1"),
        (lambda path: story(0, -7), "-7"),
        (lambda path: story(0, 2**64), str(2**64)),
        (lambda path: write(path, 0, 0, 0), "0"),
        (lambda path: write(path, 0, 0, 100, workers=-2), "-2"),
    ],
)
def test_bad_numbers(tmp_path, call, value):
    with pytest.raises(ValueError, match=f"{value}.*; allowed: "):
        call(tmp_path / "text")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_processes_end_with_a_parent_that_is_killed(tmp_path):
    code = "from cs336_systems.training import stories; stories.write('stories', 0, 0, 10**12, workers=2)"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    try:
        wait_until(lambda: len(children.read_text().split()) == 2, 100)
        started = children.read_text().split()
        wait_until(lambda: (tmp_path / "stories.part").stat().st_size > 0, 100)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(running(int(pid)) for pid in started), 30)
