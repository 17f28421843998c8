"""Short stories for children with a known entropy: text to train on without a network, a license or a limit of size.

A grammar with a state tells them: who is where, has what, and what happened, decide what can come next. Every choice
shows in the text before the next one: up to there the texts of its alternatives differ, and none begins with another.
So a text can be read back choice by choice, and -log p(text) is the sum of -log p(choice): a language model's floor.

    name: a text|3*another; ...     tables; the second alternative is three times as likely
    name = word word/words word~    words, the first the likeliest; / plural or past, ~ she, _ a blank
    name > key: text; key: text     the tables name.key
    <name> <name.x> [this|that]     one alternative; one of the table name.VALUE, or else `name`, for the value of x
    {x:name} {-x:name}              an alternative not yet drawn from `name` in this story, now called x (-: silently)
    {x} {an x} {x.s} {x.He} {he}    that text; its article; plural or past; a person's pronoun, that of a
    {x=y}                           silently: x is what y is, or the word y
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, chain, count
from math import fsum, inf, log
from pathlib import Path
from random import Random

from tqdm import tqdm

from cs336_systems.store.pool import Pool

GRAMMAR = """
story: [Once upon a time there was|Once there was|This is the story of|Let me tell you about|Here is a tale about]
 {a:kid}, a <hero> who lived with {his} {g.s:grown} <home>. <trait> [One {w:weather} {t:time}, |It was {an w:weather}
 {t:time}, and <air.w>. ]<plot> <close.h>; plot: 2*<lost>|<quarrel>|<promise>|<picnic>|<bake>|<count>|<trade>; hero:
 2*little <child.a.he>|small <child.a.he>|2*young <beast>; child.he: boy; child.she: girl; home: in {an j:shape}
 [house|cottage|hut] [by|near|behind|not far from] the <place>|at the edge of a [village|forest|town]|on top of a
 [steep|green|windy|bare] hill|above a [bakery|bookshop|stable]; trait: Everybody [knew|said|thought] that {a} was
 <very> {v:virtue}.{h=virtue}|{a} was <very> {v:virtue}.{h=virtue}|{a} loved {l.s:fav} [more than anything|and drew them
 all the time].{h=fav}|{His} room was full of [pictures of|books about] {l.s:fav}.{h=fav}; then: Then|After that,|A
 little later,|Soon after,; aside: [On the way|Nearby|Not far away], {an i:odd} {x:critter} <did>
 [under|behind|beside|near] {an j:shape} <outdoor>.; did: slept|sat|was hiding|was resting|was waiting|was eating|was
 playing; glad: {a} [jumped for joy|laughed out loud|gave {g} a big hug|did a little dance].|"[Hooray|At last|I am so
 happy]!" <cried> {a}.; bed: {a} [slept|fell asleep] [happily|peacefully|quietly|with a smile] that night.; said:
 4*said|whispered|murmured|declared
close > virtue: {g} was <very> proud. "Nobody is as {v} as you," {g.he} <said>.|That [night|evening], {g} [kissed
 {him}|tucked {him} in] and <said>, "You were <very> {v} today."|<bed>; fav: That night, {a} dreamed of {an i:odd} {l}
 that could <talent>.|At bedtime, {g} told {him} a story about {an i:odd} {l} [and {an j:odd} [king|queen|witch]|that
 could <talent>].|As a treat, {g} gave {him} a [cookie|balloon] in the shape of {an l}.|<bed>
air > sunny: the [birds|children] were singing; warm: the air smelled of [grass|flowers|hay]; cloudy: the sky was as
 gray as a [mouse|stone]|the clouds looked like [sheep|pillows|ships]; windy: the [leaves|trees|curtains] were
 dancing|hats were flying down the street; bright: the [roofs|puddles|windows] were shining|one could see for miles;
 cool: people wore [scarves|coats|gloves]; foggy: no one could see the [street|fence|church]|the world looked like milk
late > morning: At noon,|Before lunch,|When the clock struck twelve,; afternoon: Toward evening,|Before supper,|When the
 sun was low,; day: Later that day,|After some hours,|At four o'clock,
lost: {a} took {his} {c:color} {o:toy} to the {p:place}. [It had been a [birthday|Christmas] present from {g}.|{He} had
 [made|built|found|bought] it {self}.|Long ago, it had belonged to {an i:odd} [aunt|king|sailor].|{He} never went
 [out|anywhere] without it.] There {he} <fun.p>. <then> {he} <went> on to the {q:place} and <fun.q>. <aside> <late.t>
 {a} [looked <fast> into {his} bag|wanted to show {g} the {o}|stopped]. The {o} was gone! [{a} felt <very> <sad>.|"Oh
 no!" {he} <cried>. "My [poor|dear|lovely] {o}!"|Tears [ran down {his} cheeks|came to {his} eyes].|{His} heart
 [sank|beat fast|grew heavy].] {He} <ran> home and told {g}. "[Do not worry|Do not cry|We will find it]," <said> {g}.
 "Where did you go today?" "To the {p} and to the {q}," <said> {a}. They [started|began to look] at the {q}. <look>
 [3*<seen>|3*<spied>|2*Nobody there had seen the {o}. So they <went> back to the {p}.{q=p} <look> [<seen>|<spied>|At
 last, {n:neighbor} came along with the {c} {o}. "I found [it|this] {r:spot.q}," {n.he} <said>. "[Is it yours|Do you
 know whose it is]?" "[It is mine|Oh yes]! Thank you!" <cried> {a}.|Suddenly, {an i:odd} {y:thief} ran past with the {o}
 in its mouth! They ran after it all over the {q}. In the end, {a} gave it {an f:fruit}, and the {y} [dropped|let go of]
 the {o}.]] [From then on, {a} [always kept the {o} in a safe place|tied the {o} to {his} belt with a string|wrote {his}
 name on {his} things].|"Next time I will [hold on to it|leave it at home|be more careful]," {a}
 [said|promised|decided].]; look: {a} <fast> looked {r:spot.q}, but [nothing was there|{he} found only {an j:junk}|there
 was only {an j:junk}].; seen: {g} looked {r:spot.q}. "[Come here|Look what I found|I see it]!" {g.he} <cried>. There
 lay the {c} {o}, [a little dusty|safe and sound|as good as new|half hidden by leaves]. <glad>; spied: Then {he} looked
 {r:spot.q}, and there [was|lay] the {c} {o}! <glad>
quarrel: {a} and {his} [best friend|friend|cousin|neighbor] {b:kid} <went> to the {p:place}. They <fun.p>. <aside>
 <then> they found {an c:color} {o:toy} {r:spot.p}. "I saw it first!" <cried> {a}. "No, [I did|it is mine]!" <cried>
 {b}. Both [pulled at|grabbed] the {o}, and [it fell into the mud{z=mud}|it flew up into a tree{z=tree}|a piece broke
 off{z=piece}]. "Look what you have done!" <cried> {b}, and [went|ran|marched] home [without a word|with red cheeks|in a
 bad mood]. {a} sat down {r:spot.p} and felt <very> <sad>. {He} wanted [{his} friend back|to play with {b} again]. So
 {he} <fast> <mend.z>, and took it to {b}'s house. "I am sorry," {he} <said>. "[I was selfish|You are more important
 than {an o}]." "I am sorry too," <said> {b}. "[I should not have shouted|I was angry, but I missed you]." [From then
 on, they shared the {o}: one {i:span} for {b}, one {i} for {a}.|Suddenly, they saw a name on the {o}: {d:kid}. "We must
 give it back!" <said> {b}. So they did, and {d} was so glad that all three [played together|became friends].|They took
 turns with the {o} [until it was dark|for the whole week].]; mend.mud: washed the {o} [under the pump|in the
 stream|with soap and water]; mend.tree: [climbed the tree|shook the branches|took a long stick] and got the {o} down;
 mend.piece: mended the {o} with [glue|string|tape]
promise: {a} promised {g} to {d:duty} [before supper|by noon|that day]. "[You can count on me|I will not forget|Of
 course I will]," {he} <said>. {g} [smiled|nodded] and <went> to [town|work|the market]. <then> {b:kid} [came to the
 gate|knocked at the door|called over the fence]. "[Come with me to|Let us go to] the {p:place}!" {b.he} <cried>.
 [3*"First I have to {d}," {a} <said>. [{b} [sighed|frowned] but waited [by the gate|on the steps] while {a} {d.s}.|"I
 will help you," <said> {b}. Together they {d.s}, [and it was done in no time|and they sang all the while].] Then they
 <went> to the {p} and <fun.p>. <aside> When {g} came home, {g.he} saw that all was done. "[You kept your promise|I knew
 that I could trust you]," {g.he} <said>, and gave {him} {an f:fruit}.|2*{a} forgot [all about it|{his} promise] and ran
 along. At the {p} they <fun.p>. <aside> Suddenly, {a} [stood still|turned pale]. "Oh dear! I promised to {d}!" {he}
 <cried>. {He} <ran> home, but it was too late: <fail.d>. {a} {d.s} at once. "I am sorry. I broke my promise," {he}
 <said>. "[It was good of you to tell me|Everybody forgets something sometimes]," <said> {g}. The next day, {a} {d.s}
 [before breakfast|without being asked].]
fail > feed the hens: the hens were screaming with hunger; water the beans: the beans were hanging their heads; wash the
 dishes: there was no clean plate for supper; sweep the floor: the mice were dancing in the crumbs; walk the dog: the
 dog had chewed up a shoe; milk the goat: the goat was crying in its shed
picnic: {a} packed a basket for a picnic. In it were {e:food}, {r:food} and {u:food}. {His} [best|old|new|good] friend
 {b:kid} brought [a blanket|two cups|a pillow] and {m:drink.w}. They <went> to the {p:place} and sat down {q:spot.p}.
 <aside> First they <fun.p>, and then they were <very> hungry. They ate [the {e}{i=r}{o=u}|the {r}{i=e}{o=u}|the
 {u}{i=e}{o=r}] and drank the {m}. [Suddenly, {an j:odd} {y:thief} [came running|jumped out] and snatched the {i}! {b}
 ran after it, but it [was too fast|ate them all]. "It must be <very> hungry," <said> {a}. They laughed and shared the
 {o}.|2*Then a drop of rain fell on {a}'s nose. Soon it was [pouring|raining hard]. They [held the basket over their
 heads and ran|ran home through the puddles]. They were [wet to the skin|dripping wet], and the {i} were [wet|soggy]
 too. But the {o} were [dry|as good as ever]. {g} gave them [towels|dry clothes|warm socks], and they ate the {o} [by
 the stove|under the table|on the kitchen floor].|Along came {n:neighbor}, who looked <very> [tired|hungry|lonely].
 "Please sit down with us," <said> {a}, and gave {n.him} the {i}. "Nobody has been so kind to me for a long time," {n}
 <said>. Then all three shared the {o} and [told jokes|sang songs|watched the clouds|made plans].]; drink: milk|apple
 juice|cold tea|water; drink.cool: hot tea|warm milk|hot soup; drink.warm: lemonade|iced tea|ice water
bake: {a} wanted to bake {an z:cake} for {n:neighbor}, who [was ill{e=ill}|had a birthday{e=day}|had broken {n.his}
 leg{e=leg}|had just moved in{e=new}]. "We need {i:ingr}, {j:ingr} and {k:ingr}," {g} read [from the recipe|in the
 cookbook]. They had [{i} and {j}, but no {k}{y=k}|{i} and {k}, but no {j}{y=j}|{j} and {k}, but no {i}{y=i}]. [So {a}
 <went> to {b:kid}'s house. "Do you have any {y}?" {he} asked. "[Yes|Of course|I think so]," <said> {b}, and gave {him}
 some.|Then {a} [broke open|emptied] {his} piggy bank and bought some {y}.|"We can take {u:ingr} instead," <said>
 {g}.{y=u}] {a} <fast> [stirred|mixed] everything and got [dough|sugar] on {his} [nose|ears|sleeves]. Soon the whole
 [kitchen|house|street] smelled [good|wonderful|delicious]. <aside> When {a} brought the {z} to {n}, {n.he} [could
 hardly believe it|laughed with joy] and [took a big bite|tried a piece at once]. "[I can taste the {y}|It is the best
 {z} in town]," {n.he} <said>. "<thanks.e>"; thanks.ill: I feel [much |]better already.; thanks.day: This is my
 [best|happiest] birthday [ever|for years].; thanks.leg: My leg hardly hurts now.; thanks.new: Now I feel at home here.
count: {a} filled {an z:bag} with {n:number} {f.s:fruit} for {r:neighbor}.{m=n} <take> <take> <take> <then> {a} [came
 to|reached] {r}'s house. "Here are {n} {f.s}," {he} <said>. "There were {m} of them, but [the way was long|I met many
 hungry mouths]." {r} [laughed|smiled]. "{n.Up} {f.s} are [just right|enough] for {an x:cake}," {r.he} <said>.; take:
 {-e:event}<ev.e> {-n:less.n}[Now {he} had {n}|That left {n}|So there were {n}] {f.s}.
ev > friend: {a} met {b:kid}, who [looked hungry|had lost {b.his} lunch], and gave {b.him} one.; rest: Under {an
 q:tree}, {he} sat down and ate one {self}.; thief: Along came {an i:odd} {y:thief} that [took|stole|snatched] one and
 ran away.; drop: One fell out of the {z} and rolled [into the river|under a fence|down the hill].; horse: A horse
 looked over {an j:shape} <outdoor>, and {he} gave it one.; baby: A baby was crying in the street, so {he} gave it one
 to play with.; bird: Some birds [flew down|came] and picked at one until nothing was left of it.
less > ten: nine; nine: eight; eight: seven; seven: six; six: five; five: four; four: three; three: two
trade: {a} had {an x:thing}, but what {he} wanted was {an c:color} {o:toy}. {b:kid} had one. "You can have it if you
 bring me {an z:thing}," <said> {b}. So {a} <went> to {n:neighbor}, who had [two|one]. "I will give you {an z} for {an
 y:thing}," <said> {n}. "Mine [is broken|is lost|fell into the river]." So {a} <went> to {m:neighbor}, who had {an y}.
 "Take it," <said> {m}, "but [please give me|I have always wanted] your {x}." So {a} gave {m} the {x} and got the {y}.
 {He} gave {n} the {y} and got the {z}. {He} gave {b} the {z} and got the {c} {o}. ["[What a long way|So many steps] for
 {an o}!" <said> {g}.|And then {a} and {b} [played together|shared it].|The next day, {a} [missed|needed] the {x}.]
kid = Lily~ Tom Mia~ Ben Anna~ Sam Lucy~ Max Rosie~ Leo Emma~ Jack Nora~ Tim Ella~ Finn Molly~ Oscar Ruby~ Theo Daisy~
 Noah Clara~ Hugo Ivy~ Felix Alice~ Jacob Hazel~ Peter Zoe~ Owen Poppy~ Toby Maya~ Luke Sophie~ Milo Grace~ Simon Nina~
 Oliver Tess~ Eddie Wendy~ Arthur Penny~ George Violet~ Ravi Yuki~ Omar Amina~ Kofi Ingrid~ Mateo; grown = Mom/mother~
 Grandma/grandmother~ Dad/father Grandpa/grandfather Aunt_May/aunt_May~ Uncle_Joe/uncle_Joe Aunt_Rose/aunt_Rose~
 Uncle_Ned/uncle_Ned; neighbor = Mrs._Brown~ Mr._Hill Miss_Lee~ Mr._Wood Mrs._Stone~ Mr._Park Miss_Field~ Mr._Moss
 Mrs._Lake~ Mr._Fox; beast = rabbit fox bear mouse hedgehog squirrel badger otter mole beaver raccoon; virtue = kind
 brave clever patient honest helpful gentle polite thoughtful cheerful generous curious calm; fav = horse dragon train
 star owl rocket butterfly whale dinosaur boat elephant penguin lion turtle robot dolphin giraffe snail pirate; weather
 = sunny warm cloudy windy bright cool foggy; time = morning afternoon day; place = park beach farm pond playground
 market harbor castle; color = red blue green yellow white little orange purple pink brown striped silver shiny golden
 old new big; toy = ball kite doll drum book scarf hat whistle toy_boat robot flute bell teddy_bear puppet toy_train
 magnet spinning_top music_box yo-yo; junk = old_shoe rusty_spoon snail paper_bag bottle_cap broken_cup spider
 single_sock bent_nail feather sleeping_cat dead_leaf; fruit = apple pear plum peach orange cherry banana apricot lemon
 fig; thief = dog goat puppy cat pig; cake = cake pie tart pudding cheesecake strudel; ingr = flour sugar butter milk
 honey eggs nuts raisins cinnamon cream cocoa salt; tree = apple_tree oak willow pine chestnut_tree; bag = basket bag
 bucket hat sack; number = ten eight seven nine six five; thing = rope lantern umbrella teapot broom bucket candle
 hammer blanket ladder pan clock mirror saw rug chair barrel pillow; critter = robin frog squirrel toad hen pigeon
 lizard hare beetle sparrow donkey; odd = old little fat sleepy funny friendly shy strange tired lonely noisy hungry
 proud quiet clever; shape = old small tall crooked narrow pretty mossy wide; outdoor = fence bush hedge wall tree rock
 bench gate cart log; sad = sad upset unhappy lonely miserable gloomy; cried = cried called shouted yelled exclaimed;
 fast = quickly slowly carefully quietly calmly patiently bravely nervously; very = very really truly quite; went = went
 ran walked hurried skipped strolled marched; ran = ran hurried raced rushed; talent = sing dance fly talk cook read
 swim count; food = sandwiches grapes muffins boiled_eggs cherries carrots cookies pears crackers strawberries rolls
 plums pancakes radishes nuts; duty = feed_the_hens/fed_the_hens water_the_beans/watered_the_beans
 wash_the_dishes/washed_the_dishes sweep_the_floor/swept_the_floor walk_the_dog/walked_the_dog
 milk_the_goat/milked_the_goat; span = day week month hour; event = friend rest thief drop horse baby bird
spot > park: under the bench|behind the fountain|beside the roses|near the statue|on the bandstand; beach: beside the
 pier|behind a dune|between two rocks|under a beach chair; farm: in the hay|behind the barn|near the pigpen|under the
 tractor|beside the henhouse; pond: among the reeds|on the little bridge|under the willow|beside the duck house;
 playground: under the slide|in the sandbox|behind the swings|near the seesaw|beside the climbing frame; market: under
 the fish stall|beside the flower cart|behind the cheese stand|between the melons|near the well; harbor: behind some
 crates|under a net|beside the lighthouse|on the stone steps|near the sailboats; castle: on the tower stairs|beside the
 drawbridge|in the courtyard|behind a cannon|under the archway
fun > park: fed the pigeons|ran around the fountain|rolled down the slope; beach: built a sandcastle|jumped over the
 waves|collected shells; farm: petted the calves|fed the goats|sat on the tractor; pond: counted the frogs|fed the
 ducks|threw pebbles into the water; playground: went down the slide|flew high on the swings|walked on the beam; market:
 tasted the cheese|smelled the flowers|listened to the singer; harbor: watched the fishing boats|waved to the
 sailors|counted the gulls; castle: climbed the tower|played knights and queens|looked for secret doors
"""
_FORMS = ("", "an", "An", "s", "Up", "he", "his", "him", "He", "His", "self")
_PIECE = re.compile(r"\{(.*?)\}|<(.*?)>|(\d+)\*|([\[|\]])|([^{<\[|\]\d]+)")
_FIELD = re.compile(r"(-?)(?:([Aa]n) )?(\w*)(?:\.(\w+))?(?::(\w+)\.?(\w*)\.?(\w*))?|(\w+)=(\w+)")
_BLOCK = 512  # stories that a process makes at a time


@dataclass(frozen=True)
class Story:
    text: str  # one line
    nats: float  # -log p(text)


@dataclass(frozen=True)
class Total:
    stories: int
    bytes: int  # with the ends of lines
    nats: float


class Table:
    """Alternatives: weights, lists of steps (see `tell`) with the last first, the forms of those that are a word."""

    def __init__(self, weights: list[int], steps: list[list]) -> None:
        self.weights, self.steps = weights, steps
        self.words = [_forms(step[0]) for step in steps if len(step) == 1 and type(step[0]) is str]
        self.cumulative = list(accumulate(weights))
        self.nats = [log(self.cumulative[-1] / weight) if weight else inf for weight in weights]

    def without(self, drawn: list[tuple]) -> Table:
        weights = [0 if word in drawn else w for word, w in zip(self.words, self.weights, strict=True)]
        return Table(weights, self.steps)


@cache
def _forms(text: str) -> tuple[str, ...]:
    """`fox`, `goose/geese`, `Mia~`: a text in all `_FORMS`."""
    one, _, many = text.removesuffix("~").partition("/")
    article = ("an " if one[0] in "aeiou" else "a ") + one
    many = many or re.sub("([^aeiou])y$", r"\1ie", one) + "e" * bool(re.search("(s|x|ch|sh)$", one)) + "s"
    person = "she her her She Her herself" if text[-1] == "~" else "he his him He His himself"
    return (one, article, "A" + article[1:], many, one[0].upper() + one[1:], *person.split())


def _table(pieces: Iterator[tuple[str, ...]]) -> Table:
    """The alternatives before the next closing bracket."""
    weights, steps = [1], [[]]
    for field, name, weight, mark, text in pieces:
        if mark == "]":
            break
        if mark == "|":
            weights.append(1)
            steps.append([])
        elif weight:
            weights[-1] = int(weight)
        elif mark or text:
            steps[-1].append(text or _table(pieces))
        else:
            steps[-1] += _field(field or f"-:{name}")
    return Table(weights, [alternative[::-1] for alternative in steps])


def _field(field: str) -> list[tuple]:
    silent, an, x, form, name, by, by_form, to, source = _FIELD.fullmatch(field).groups("")
    if to:
        return [(to, source)]
    if x in _FORMS[5:]:
        x, form = "a", x
    choice = [(name, by, _FORMS.index(by_form), x)] if name else []
    return choice if silent else [*choice, (x, _FORMS.index(an or form))]


def _tables(grammar: str) -> dict[str, Table]:
    tables = {}
    for family, body in re.findall(r"^(?:(\w+) > )?(\S.*(?:\n .*)*)", grammar, re.MULTILINE):
        for definition in re.split(r";\s+", re.sub(r"\s+", " ", body)):
            name, kind, texts = re.fullmatch(r"(.+?)(:| =) (.*)", definition).groups()
            if kind == ":":
                table = _table(iter(_PIECE.findall(texts)))
            else:
                words = [[word.replace("_", " ")] for word in texts.split()]
                table = Table([2520 // (rank + 8) for rank in range(len(words))], words)
            tables[f"{family}.{name}" if family else name] = table
    return tables


TABLES = _tables(GRAMMAR)


def tell(choose: Callable[[Table], int], todo: list, bound: dict, drawn: dict, said: list[str]) -> None:
    """Takes the steps `todo`, the last first; `choose` gets a table, its step still in `todo`, and returns a number.

    A step: a text to say; a table to choose from; (x, form) says what x is bound to; (x, y) binds x to what y is, or to
    the word; (name, x, form, to) chooses from the table for the value of x, and, with a name `to`, binds that.
    """
    while todo:
        step = todo[-1]
        if step.__class__ is str:
            said.append(todo.pop())
        elif step.__class__ is tuple and len(step) == 2:
            x, what = todo.pop()
            if what.__class__ is int:
                said.append(bound[x][what])
            else:
                bound[x] = bound.get(what) or _forms(what)
        else:
            table, to = step, ""
            if step.__class__ is tuple:
                name, x, form, to = step
                table = TABLES.get(f"{name}.{bound[x][form]}") or TABLES[name] if x else TABLES[name]
                if to and name in drawn:
                    table = table.without(drawn[name])
            chosen = choose(table) if len(table.steps) > 1 else 0
            todo.pop()
            if to:
                bound[to] = table.words[chosen]
                drawn.setdefault(name, []).append(bound[to])
            else:
                todo += table.steps[chosen]


def story(seed: int, index: int) -> Story:
    """A story, the same on every machine. ValueError unless the seed is at least 0, and the index 0 ... 2**64 - 1."""
    if seed < 0 or not 0 <= index < 2**64:
        raise ValueError(f"story {index} of seed {seed}; allowed: seeds from 0, stories 0 to {2**64 - 1}")
    random, said, nats = Random(seed << 64 | index).random, [], []

    def choose(table: Table) -> int:
        chosen = bisect(table.cumulative, random() * table.cumulative[-1])
        nats.append(table.nats[chosen])
        return chosen

    tell(choose, [TABLES["story"]], {}, {}, said)
    return Story("".join(said), fsum(nats))


def stories(seed: int, start: int, count: int) -> Iterator[Story]:
    return (story(seed, index) for index in range(start, start + count))


def _block(seed: int, start: int) -> list[Story]:
    return list(stories(seed, start, _BLOCK))


def write(path: str | Path, seed: int, start: int, num_bytes: int, workers: int = 1) -> Total:
    """Writes stories, one a line, until there are `num_bytes`: the same for all `workers`. ValueError below 1."""
    for what, value in (("num_bytes", num_bytes), ("workers", workers)):
        if value < 1:
            raise ValueError(f"{what} {value}; allowed: from 1")
    written, size, nats, part = 0, 0, 0.0, Path(f"{path}.part")
    with (
        part.open("wb") as file,
        tqdm(total=num_bytes, unit="B", unit_scale=True, disable=None) as bar,
        Pool(workers if workers > 1 else 0) as pool,
    ):
        blocks = (pool.map if workers > 1 else map)(partial(_block, seed), count(start, _BLOCK))
        for one in chain.from_iterable(blocks):
            line = file.write(one.text.encode() + b"\n")
            written, size, nats = written + 1, size + line, nats + one.nats
            bar.update(line)
            if size >= num_bytes:
                break
    part.replace(path)  # a file of this name is whole
    return Total(written, size, nats)
