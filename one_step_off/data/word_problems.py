"""Generated problems in the GSM8K form (`question`, `answer` ending in `#### N`): data that no
download can spoil.

All generators take (split, size, seed). Train and test never share a problem, whatever their seeds.
"""

import hashlib
import json
import random
from collections.abc import Callable
from math import gcd
from typing import Any

Row = dict[str, str]

FIRST, SECOND = range(10, 100), range(1, 10)
"""Operands: two digits, then one digit, and only the last digit changes (no carry, no borrow). So a
held-out problem is made of parts that the train split teaches (3 + 5 under other tens): a tiny
model can solve it by the rule."""

TEST_PERCENT = 15
NAMES = ("Anna", "Ben", "Tom", "Mia", "Sam", "Lily", "Max", "Eva")
OBJECTS = ("apples", "books", "coins", "cards", "pens", "shells", "stamps", "balls")
TEMPLATES = {
    "+": (
        "{name} has {ax} and gets {b} more. How many {x} does {name} have now?",
        "{name} has {ax}. {other} gives {name} {b} more. How many {x} does {name} have?",
        "{name} has {ax} and {other} has {b}. How many {x} do they have together?",
        "A box holds {ax}. {name} puts in {b} more. How many {x} are in the box?",
        "{name} finds {ax} today and {b} the next day. How many {x} does {name} find?",
        "{name} buys {ax}, then {b} more. How many {x} does {name} buy in all?",
    ),
    "-": (
        "{name} has {ax} and loses {b}. How many {x} does {name} have now?",
        "{name} has {ax} and gives {b} to {other}. How many {x} does {name} have left?",
        "{name} has {ax} and {other} has {b}. How many more {x} does {name} have?",
        "A box holds {ax}. {name} takes out {b}. How many {x} are in the box?",
        "{name} has {ax} and sells {b}. How many {x} are left?",
        "{name} needs {ax} and has {b}. How many more {x} does {name} need?",
    ),
}
_SURFACES = len(TEMPLATES["+"]) * len(NAMES) * len(OBJECTS)


def _split_of(key: str) -> str:
    """The split of a problem, from its own content: the same in every run, process and Python
    version.
    """
    return (
        "test"
        if int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % 100 < TEST_PERCENT
        else "train"
    )


def triples(split: str) -> list[tuple[str, int, int]]:
    """The (operation, a, b) that belong to one split."""
    space = [("+", a, b) for a in FIRST for b in SECOND if a % 10 + b < 10]
    space += [("-", a, b) for a in FIRST for b in SECOND if a % 10 >= b]
    return [(op, a, b) for op, a, b in space if _split_of(f"{op} {a} {b}") == split]


def _row(triple: tuple[str, int, int], surface: int) -> Row:
    op, a, b = triple
    rest, template = divmod(surface, len(TEMPLATES[op]))
    who, what = divmod(rest, len(OBJECTS))
    # The second person is a function of the first, so that a surface stays one small number.
    other, x = NAMES[(who + 3) % len(NAMES)], OBJECTS[what]
    question = TEMPLATES[op][template].format(name=NAMES[who], other=other, x=x, ax=f"{a} {x}", b=b)
    result = a + b if op == "+" else a - b
    return {"question": question, "answer": f"{a} {op} {b} = {result}\n#### {result}"}


def make(split: str, size: int, seed: int) -> list[Row]:
    """Word problems of one addition or subtraction, as `{"question": ..., "answer": "27 + 2 =
    29\\n#### 29"}`. Every (operation, a, b) of the split is used once before any is used again, and
    then with another wording. A shorter list is a prefix of a longer one. Raises ValueError: a test
    split larger than its different questions."""
    space = triples(split)
    if split == "test" and size > len(space) * _SURFACES:
        raise ValueError(
            f"the test split of word_problems holds {len(space) * _SURFACES} problems; ask for fewer"
        )
    rng, rows = random.Random(f"word_problems {split} {seed}"), []
    # A stride coprime to the number of wordings visits each of them once before it returns to the
    # first.
    strides = [s for s in range(1, _SURFACES) if gcd(s, _SURFACES) == 1]
    walks = {t: (rng.randrange(_SURFACES), rng.choice(strides)) for t in space}
    for turn in range(-(-size // len(space))):
        rng.shuffle(space)
        chosen = ((t, *walks[t]) for t in space[: size - len(rows)])
        rows += [_row(t, (start + turn * stride) % _SURFACES) for t, start, stride in chosen]
    return rows


def _pairs(sign: str, split: str, size: int, rng: random.Random) -> list[tuple[int, int]]:
    """Operands of two digits. a, b and b, a are of one split; pairs repeat only in a list longer
    than the split.
    """
    space = [
        (a, b)
        for a in FIRST
        for b in FIRST
        if _split_of(f"{min(a, b)} {sign} {max(a, b)}") == split
    ]
    return [pair for _ in range(0, size, len(space)) for pair in rng.sample(space, len(space))][
        :size
    ]


def _chat(turns: list[tuple[str, str]], truth: str) -> dict[str, Any]:
    prompt = [{"role": role, "content": text} for role, text in turns]
    return {"prompt": prompt, "reward_model": {"ground_truth": truth}}


def make_addition(split: str, size: int, seed: int) -> list[dict[str, Any]]:
    """Sums as `_pairs` has them, as chat messages, the first of them solved: `27 + 58 =` wants `27
    + 58 = 85`. For small pretrained models: SmolLM2-135M-Instruct hits none when asked in words,
    and a fifth when shown one."""
    shown = [("system", "Calculate."), ("user", "12 + 35 ="), ("assistant", "12 + 35 = 47")]
    pairs = _pairs("+", split, size, random.Random(f"addition {split} {seed}"))
    return [_chat([*shown, ("user", f"{a} + {b} =")], str(a + b)) for a, b in pairs]


_PRODUCTS = (
    "What is {a} * {b}?",
    "A box holds {a} pens. How many pens are in {b} boxes?",
    "Each of {b} books costs {a} coins. How many coins are that?",
)


def make_products(split: str, size: int, seed: int) -> list[Row]:
    """Products as `_pairs` has them: more than a tiny model can know, so that it needs a
    calculator.
    """
    rng = random.Random(f"products {split} {seed}")
    asked = (
        (rng.choice(_PRODUCTS).format(a=a, b=b), a, b) for a, b in _pairs("*", split, size, rng)
    )
    return [
        {"question": question, "answer": f"{a} * {b} = {a * b}\n#### {a * b}"}
        for question, a, b in asked
    ]


PUZZLES = ("countdown", "number_sorting", "word_sorting", "simple_equations")


def make_puzzles(split: str, size: int, seed: int) -> list[dict[str, Any]]:
    """Puzzles of reasoning-gym for the agent loop `environment`, which scores them itself. Train
    has even seeds.
    """
    import reasoning_gym

    rows = []
    for i in range(size):
        name, own = PUZZLES[i % len(PUZZLES)], 2 * (seed * 1_000_003 + i) + (split == "test")
        question = reasoning_gym.create_dataset(name, size=1, seed=own)[0]["question"]
        truth = json.dumps({"dataset": name, "seed": own})
        rows.append(_chat([("user", question)], truth) | {"agent_loop": "environment"})
    return rows


GENERATORS: dict[str, Callable[[str, int, int], list[Any]]] = {
    "word_problems": make,
    "addition": make_addition,
}
GENERATORS |= {"products": make_products, "puzzles": make_puzzles}


def default_test_size(name: str) -> int:
    """Held-out problems where the config asks for all: one per held-out (operation, a, b), or
    256.
    """
    return len(triples("test")) if name == "word_problems" else 256
