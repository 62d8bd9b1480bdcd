"""The built-in story text: an endless seeded stream of simple English stories.

Each story plays out in a tiny world where friends carry things, give them away, hide them and look
for them, so that who holds what and where it lies can be predicted only by looking back:

    One windy morning, Mia the rabbit and her friend Tom met in the garden. Mia had a small red kite. …
    Mia put the kite under the bench. … "Where is the kite?" asked Tom. "It is under the bench," said Mia.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

# (name, subject, object, possessive)
_SHE, _HE = ("she", "her", "her"), ("he", "him", "his")
_GIRLS = (
    "Mia Lily Anna Sue Lucy Emma Ella Zoe Nora Ivy Rosa Kim Jane Amy Ruby Clara Molly Tina Maya Hana Greta "
    "Olga Pia Wendy"
).split()
_BOYS = (
    "Tom Ben Max Tim Sam Leo Jack Finn Omar Hugo Theo Adam Paul Otto Ravi Luke Noah Eric Carl Dan Felix "
    "Ivan Jonas Milo"
).split()
_KINDS = (
    "rabbit fox bear mouse duck frog hedgehog squirrel cat dog turtle owl pig goat badger otter penguin lamb"
).split()
_TRAITS = "kind brave shy clever funny quiet curious gentle lazy busy proud cheerful patient noisy".split()

_THINGS = (
    "ball kite book drum hat cup bell lamp spoon scarf doll boat train flute key map shell stone feather "
    "button ribbon candle basket whistle puzzle blanket mirror brush ring coin mask rope wagon pencil"
).split()
_LOOKS = (
    "red blue green yellow white black silver golden purple orange pink brown striped spotted shiny wooden"
).split()
_SIZES = "small big tiny old new pretty soft heavy round strange lovely plain".split()
_FOODS = "apples pears berries cookies pancakes nuts plums carrots bread cheese soup cake honey corn".split()

# A place, and the spots in it where a thing can lie.
_PLACES: dict[str, tuple[str, ...]] = {
    "in the garden": ("under the bench", "behind the roses", "next to the gate", "in the flower pot"),
    "in the kitchen": ("on the table", "in the cupboard", "behind the stove", "under the chair"),
    "in the forest": ("under a fern", "in a hollow tree", "behind a log", "on a tree stump"),
    "at the beach": ("under a towel", "behind the rocks", "in the sand", "on the old pier"),
    "in the barn": ("in the hay", "on the ladder", "behind the barrel", "under the cart"),
    "at the pond": ("in the reeds", "under the bridge", "on a flat rock", "behind the willow"),
    "at school": ("in the desk", "on the shelf", "under the piano", "behind the door"),
    "in the attic": ("in the chest", "behind the curtain", "on the beam", "under the quilt"),
    "on the hill": ("under the big oak", "behind the wall", "in the tall grass", "on the picnic rug"),
    "at the market": ("under the counter", "in the crate", "behind the scales", "on the bread stand"),
    "in the library": ("on the window seat", "under the stairs", "behind the globe", "in the drawer"),
    "at the station": ("on the platform", "under the clock", "behind the trolley", "in the waiting room"),
}
_TIMES = (
    "One sunny day",
    "One windy morning",
    "One rainy afternoon",
    "One cold winter day",
    "On a warm summer evening",
    "Early one spring morning",
    "Last week",
    "Once upon a time",
    "A long time ago",
)
_FEELINGS = "happy glad excited pleased proud grateful".split()
_SAD_FEELINGS = "sad worried upset cross puzzled lonely".split()
_LESSONS = (
    "Friends share what they have",
    "It is good to remember where you put your things",
    "A kind word is never wasted",
    "Looking together is faster than looking alone",
    "Asking is better than guessing",
    "Those who give also receive",
)


def _a(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


@dataclass
class _Friend:
    name: str
    kind: str
    pronouns: tuple[str, str, str]
    place: str


@dataclass
class _Thing:
    """Held by a friend, or lying at a spot of a place."""

    name: str
    looks: str
    owner: _Friend
    holder: _Friend | None
    place: str = ""
    spot: str = ""


class _World:
    """The state of one story; each event changes it and returns the sentences that tell so."""

    def __init__(self, random: Random) -> None:
        self.random = random
        girls, boys = random.sample(_GIRLS, 3), random.sample(_BOYS, 3)
        cast = [(name, _SHE) for name in girls] + [(name, _HE) for name in boys]
        random.shuffle(cast)
        self.places = random.sample(sorted(_PLACES), 3)
        kinds = random.sample(_KINDS, 3)
        self.friends = [
            _Friend(name, kind, pronouns, self.places[0])
            for (name, pronouns), kind in zip(cast[: random.choice((2, 3, 3))], kinds, strict=False)
        ]
        things = random.sample(_THINGS, 3)
        self.things = []
        for name in things[: random.choice((2, 2, 3))]:
            owner = random.choice(self.friends)
            looks = f"{random.choice(_SIZES)} {random.choice(_LOOKS)}"
            self.things.append(_Thing(name, looks, owner, owner))

    def pick(self, options: Sequence[str]) -> str:
        return self.random.choice(options)

    def tell(self) -> str:
        events: list[Callable[[], str]] = [
            self.walk, self.give, self.give, self.hide, self.hide, self.find, self.find, self.ask, self.ask,
            self.trade, self.snack, self.play, self.chat,
        ]  # fmt: skip
        paragraphs = [[self.opening(), *map(self.introduce, self.things)]]
        last: Callable[[], str] | None = None
        for _ in range(self.random.choice((2, 2, 3))):
            told: list[str] = []
            while len(told) < 4:
                event = self.random.choice([e for e in events if e != last])
                sentence = event()
                if sentence:
                    told.append(sentence)
                    last = event
            paragraphs.append(told)
        paragraphs.append([*map(self.whereabouts, self.things), self.ending()])
        return "\n".join(" ".join(paragraph) for paragraph in paragraphs)

    def opening(self) -> str:
        a, b = self.friends[:2]
        third = f" and {self.friends[2].name} the {self.friends[2].kind}" if len(self.friends) > 2 else ""
        link = "," if third else " and"
        company = f"{a.name} the {a.kind}{link} {b.name} the {b.kind}{third}"
        trait = f"{a.name} was very {self.pick(_TRAITS)}, and {b.name} was {self.pick(_TRAITS)}."
        verb = self.pick(("met", "were playing", "were sitting together", "had a picnic"))
        return f"{self.pick(_TIMES)}, {company} {verb} {a.place}. {trait}"

    def introduce(self, thing: _Thing) -> str:
        owner, phrase = thing.owner, _a(f"{thing.looks} {thing.name}")
        return self.pick(
            (
                f"{owner.name} had {phrase}.",
                f"{owner.name} had brought {phrase}.",
                f"{owner.name} held {phrase} in {owner.pronouns[2]} hands.",
                f"There was {phrase} that belonged to {owner.name}.",
            )
        )

    def walk(self) -> str:
        friend = self.random.choice(self.friends)
        here, friend.place = friend.place, self.pick(self.places)
        if friend.place == here:
            return ""
        carried = [thing.name for thing in self.things if thing.holder is friend]
        along = f" and took the {carried[0]} along" if carried else ""
        where = friend.place
        how = self.pick(("walked away", "ran off", "went for a walk", "hurried away"))
        return f"Then {friend.name} {how}{along}. Soon {friend.pronouns[0]} was {where}."

    def _meet(self, a: _Friend, b: _Friend) -> str:
        """Brings b to a, and says so if b was elsewhere."""
        if a.place == b.place:
            return ""
        b.place = a.place
        return f"{b.name} came to see {a.name} {a.place}. "

    def give(self) -> str:
        held = [thing for thing in self.things if thing.holder]
        if not held:
            return ""
        thing = self.random.choice(held)
        giver = thing.holder
        assert giver is not None
        taker = self.random.choice([f for f in self.friends if f is not giver])
        met = self._meet(giver, taker)
        thing.holder = taker
        he = taker.pronouns[0]
        told = self.pick(
            (
                f'"You can have my {thing.name}," said {giver.name}.'
                if thing.owner is giver
                else f'"Here is the {thing.name}," said {giver.name}.',
                f'"May I hold the {thing.name}?" asked {taker.name}. "Yes, you may," said {giver.name}.',
                f"{giver.name} smiled and held out the {thing.name}.",
            )
        )
        after = self.pick(
            (
                f"{giver.name} gave the {thing.name} to {taker.name}.",
                f"So {taker.name} took the {thing.name} and thanked {giver.name}.",
                f"Now {taker.name} had the {thing.name}, and {he} was {self.pick(_FEELINGS)}.",
            )
        )
        return f"{met}{told} {after}"

    def hide(self) -> str:
        held = [thing for thing in self.things if thing.holder]
        if not held:
            return ""
        thing = self.random.choice(held)
        friend = thing.holder
        assert friend is not None
        thing.holder, thing.place, thing.spot = None, friend.place, self.pick(_PLACES[friend.place])
        why = self.pick(
            (
                f"{friend.name} was tired of carrying the {thing.name}.",
                f"{friend.name} wanted to keep the {thing.name} safe.",
                f'"Let us play a game," said {friend.name}.',
                f"It was time for {friend.name} to rest.",
            )
        )
        verb = self.pick(("put", "left", "hid", "laid"))
        he = _capital(friend.pronouns[0])
        return f"{why} {he} {verb} the {thing.name} {thing.spot}."

    def find(self) -> str:
        lying = [thing for thing in self.things if not thing.holder]
        if not lying:
            return ""
        thing = self.random.choice(lying)
        finder = self.random.choice(self.friends)
        came = ""
        if finder.place != thing.place:
            finder.place = thing.place
            came = f"A little later, {finder.name} was {thing.place}. "
        he = finder.pronouns[0]
        told = self.pick(
            (
                f"{finder.name} looked {thing.spot} and found the {thing.name}.",
                f"{_capital(thing.spot)}, {finder.name} saw the {thing.name} and picked it up.",
                f'"Look, the {thing.name} is {thing.spot}!" said {finder.name}, and {he} took it.',
            )
        )
        thing.holder = finder
        return came + told

    def ask(self) -> str:
        thing = self.random.choice(self.things)
        asker, teller = self.random.sample(self.friends, 2)
        if asker is thing.holder:
            return ""
        met = self._meet(teller, asker)
        question = self.pick(
            (
                f'"Where is the {thing.name}?" asked {asker.name}.',
                f'{asker.name} looked {self.pick(_SAD_FEELINGS)}. "Who knows where the {thing.name} is?"',
                f'"I cannot see the {thing.looks} {thing.name}," said {asker.name}.',
            )
        )
        if thing.holder is teller:
            answer = f'"I have the {thing.name}," said {teller.name}.'
        elif thing.holder:
            answer = f'"{thing.holder.name} has it," said {teller.name}.'
        elif thing.place == teller.place:
            answer = f'"It is {thing.spot}," said {teller.name}.'
        else:
            answer = f'"It is {thing.place}, {thing.spot}," said {teller.name}.'
        return f"{met}{question} {answer}"

    def trade(self) -> str:
        held = [thing for thing in self.things if thing.holder]
        pairs = [(x, y) for x, y in itertools.combinations(held, 2) if x.holder is not y.holder]
        if not pairs:
            return ""
        x, y = self.random.choice(pairs)
        a, b = x.holder, y.holder
        assert a is not None
        assert b is not None
        met = self._meet(a, b)
        x.holder, y.holder = b, a
        return (
            f'{met}"I will give you the {x.name} for the {y.name}," said {a.name}. {b.name} agreed. '
            f"So {a.name} got the {y.name}, and {b.name} got the {x.name}."
        )

    def snack(self) -> str:
        a = self.random.choice(self.friends)
        here = [f.name for f in self.friends if f.place == a.place and f is not a]
        food = self.pick(_FOODS)
        if not here:
            return f"{a.name} was hungry and ate some {food} all alone."
        return f'"Who wants some {food}?" asked {a.name}. {here[0]} liked {food} very much.'

    def play(self) -> str:
        thing = self.random.choice(self.things)
        if not thing.holder:
            return ""
        name, (he, _, his) = thing.holder.name, thing.holder.pronouns
        return self.pick(
            (
                f"{name} played with the {thing.name} all by {'herself' if he == 'she' else 'himself'}.",
                f"{name} showed everyone how {thing.looks.split()[1]} the {thing.name} was.",
                f"{name} washed the {thing.name} until it was clean.",
                f"{name} dropped the {thing.name}, but {he} caught it again with {his} hands.",
            )
        )

    def chat(self) -> str:
        a, b = self.random.sample(self.friends, 2)
        met = self._meet(a, b)
        return met + self.pick(
            (
                f'"You are a good friend, {b.name}," said {a.name}.',
                f"{a.name} told {b.name} a long story about {_a(self.pick(_KINDS))} who wanted to fly.",
                f'"Are you really {_a(b.kind)}?" joked {a.name}, and {b.name} laughed.',
                f"{a.name} and {b.name} sang a song that they both knew.",
            )
        )

    def whereabouts(self, thing: _Thing) -> str:
        if thing.holder:
            return f"In the end, {thing.holder.name} had the {thing.looks} {thing.name}."
        return f"In the end, the {thing.looks} {thing.name} was still {thing.place}, {thing.spot}."

    def ending(self) -> str:
        names = [friend.name for friend in self.friends]
        company = ", ".join(names[:-1]) + " and " + names[-1]
        return self.pick(
            (
                f"{company} went home and were {self.pick(_FEELINGS)}. {self.pick(_LESSONS)}.",
                f"{company} stayed friends for ever. {self.pick(_LESSONS)}.",
                f"That night, {company} slept very well.",
            )
        )


def tales(seed: int) -> Iterator[str]:
    """Stories number 0, 1, 2, … of ``seed``, without end; the same in every process."""
    for number in itertools.count():
        yield _World(Random(f"{seed}/{number}")).tell()
