"""Stories: the same bytes everywhere, probabilities that a reader finds in the text alone, English that agrees."""

from __future__ import annotations

import hashlib
import math
import random
import statistics
from itertools import islice, pairwise

import pytest

from cs336_systems.store.pool import Pool
from cs336_systems.training import stories
from cs336_systems.training.stories import TABLES, Table, story, tell


@pytest.fixture(scope="module")
def thousand():
    return list(islice(stories.stories(0), 1000))


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
    assert list(islice(stories.stories(0, 17), 3)) == thousand[17:20]
    assert len({one.text for one in thousand}) == 1000
    assert not {one.text for one in islice(stories.stories(1), 1000)} & {one.text for one in thousand}


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


def test_stories_do_not_depend_on_the_number_of_processes():
    expected = [story(3, 40 + number) for number in range(1100)]  # of three blocks
    assert list(islice(stories.stories(3, 40), 1100)) == expected
    with Pool(2) as pool:
        assert list(islice(stories.stories(3, 40, pool.map), 1100)) == expected


@pytest.mark.parametrize(("seed", "index", "value"), [(-1, 0, "-1"), (0, -7, "-7"), (0, 2**64, str(2**64))])
def test_bad_numbers(seed, index, value):
    with pytest.raises(ValueError, match=f"{value}.*; allowed: "):
        story(seed, index)
