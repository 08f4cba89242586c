"""Generated problems, which need no download.

All generators take (split, size, seed). Train and test never share a problem, whatever their seeds.
To add a generator, write a function here, add it to GENERATORS, and repeat its name in
`config.data_checks.GENERATORS`.
"""

import hashlib
import json
import random
from collections.abc import Callable
from math import gcd
from typing import Any

QuestionRow = dict[str, str]
"""A row in the GSM8K form: `question`, and `answer` that ends in `#### N`."""

Problem = tuple[str, int, int]
"""(operation, a, b)."""

# Operands: two digits, then one digit, and only the last digit changes (no carry, no borrow). So
# the parts of a held-out problem occur in the train split too (3 + 5 under other tens), and a tiny
# model can solve it by the rule.
FIRST_OPERANDS = range(10, 100)
SECOND_OPERANDS = range(1, 10)

TEST_PERCENT = 15
DEFAULT_TEST_SIZE = 256
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
# A wording is a template, a name and an object; each operation has this many.
_WORDINGS = len(TEMPLATES["+"]) * len(NAMES) * len(OBJECTS)


def _split_of(key: str) -> str:
    """The split of a problem, from its content: the same in every run, process and Python
    version.
    """
    digest = hashlib.sha256(key.encode()).hexdigest()
    is_test = int(digest[:8], 16) % 100 < TEST_PERCENT
    return "test" if is_test else "train"


def problems_of_split(split: str) -> list[Problem]:
    """The (operation, a, b) that belong to one split."""
    problems = []
    for a in FIRST_OPERANDS:
        for b in SECOND_OPERANDS:
            if a % 10 + b < 10:
                problems.append(("+", a, b))
    for a in FIRST_OPERANDS:
        for b in SECOND_OPERANDS:
            if a % 10 >= b:
                problems.append(("-", a, b))
    return [(op, a, b) for op, a, b in problems if _split_of(f"{op} {a} {b}") == split]


def _question_row(problem: Problem, wording: int) -> QuestionRow:
    """The problem in one of its wordings, numbered from 0."""
    op, a, b = problem
    name_and_object, template_index = divmod(wording, len(TEMPLATES[op]))
    name_index, object_index = divmod(name_and_object, len(OBJECTS))
    # The second person follows from the first, so that a wording remains one small number.
    other_index = (name_index + 3) % len(NAMES)
    objects = OBJECTS[object_index]
    question = TEMPLATES[op][template_index].format(
        name=NAMES[name_index], other=NAMES[other_index], x=objects, ax=f"{a} {objects}", b=b
    )
    result = a + b if op == "+" else a - b
    return {"question": question, "answer": f"{a} {op} {b} = {result}\n#### {result}"}


def make(split: str, size: int, seed: int) -> list[QuestionRow]:
    """Word problems of one addition or subtraction.

    Example: `{"question": ..., "answer": "27 + 2 = 29\\n#### 29"}`. Every (operation, a, b) of the
    split is used once before any is used again, and then with another wording. A shorter list is a
    prefix of a longer one.

    Raises:
        ValueError: the test split has fewer different questions.
    """
    problems = problems_of_split(split)
    most = len(problems) * _WORDINGS
    if split == "test" and size > most:
        raise ValueError(f"the test split of word_problems holds {most} problems; ask for fewer")
    rng = random.Random(f"word_problems {split} {seed}")
    # A stride that is coprime to the number of wordings visits each of them once before it repeats.
    strides = [stride for stride in range(1, _WORDINGS) if gcd(stride, _WORDINGS) == 1]
    start_and_stride = {p: (rng.randrange(_WORDINGS), rng.choice(strides)) for p in problems}
    rows: list[QuestionRow] = []
    repetition = 0
    while len(rows) < size:
        rng.shuffle(problems)
        for problem in problems[: size - len(rows)]:
            start, stride = start_and_stride[problem]
            wording = (start + repetition * stride) % _WORDINGS
            rows.append(_question_row(problem, wording))
        repetition += 1
    return rows


def _operand_pairs(sign: str, split: str, size: int, rng: random.Random) -> list[tuple[int, int]]:
    """Pairs of operands of two digits.

    (a, b) and (b, a) are in one split. Pairs repeat only in a list that is longer than the split.
    """
    pairs_of_split = []
    for a in FIRST_OPERANDS:
        for b in FIRST_OPERANDS:
            if _split_of(f"{min(a, b)} {sign} {max(a, b)}") == split:
                pairs_of_split.append((a, b))
    pairs: list[tuple[int, int]] = []
    while len(pairs) < size:
        pairs += rng.sample(pairs_of_split, len(pairs_of_split))
    return pairs[:size]


def _chat_row(turns: list[tuple[str, str]], truth: str) -> dict[str, Any]:
    """A row of chat messages: (role, content) of each."""
    prompt = [{"role": role, "content": content} for role, content in turns]
    return {"prompt": prompt, "reward_model": {"ground_truth": truth}}


def make_addition(split: str, size: int, seed: int) -> list[dict[str, Any]]:
    """Sums of two-digit numbers as chat messages, after a solved example: `27 + 58 =`,
    `27 + 58 = 85`.

    For small pretrained models: SmolLM2-135M-Instruct solves none when asked in words, and a fifth
    after an example.
    """
    example = [("system", "Calculate."), ("user", "12 + 35 ="), ("assistant", "12 + 35 = 47")]
    pairs = _operand_pairs("+", split, size, random.Random(f"addition {split} {seed}"))
    return [_chat_row([*example, ("user", f"{a} + {b} =")], str(a + b)) for a, b in pairs]


_PRODUCT_TEMPLATES = (
    "What is {a} * {b}?",
    "A box holds {a} pens. How many pens are in {b} boxes?",
    "Each of {b} books costs {a} coins. How many coins are that?",
)


def make_products(split: str, size: int, seed: int) -> list[QuestionRow]:
    """Products of two-digit numbers: too many for a tiny model to learn, so that it needs a
    calculator.
    """
    rng = random.Random(f"products {split} {seed}")
    rows = []
    for a, b in _operand_pairs("*", split, size, rng):
        question = rng.choice(_PRODUCT_TEMPLATES).format(a=a, b=b)
        rows.append({"question": question, "answer": f"{a} * {b} = {a * b}\n#### {a * b}"})
    return rows


PUZZLES = ("countdown", "number_sorting", "word_sorting", "simple_equations")


def make_puzzles(split: str, size: int, seed: int) -> list[dict[str, Any]]:
    """Puzzles of reasoning-gym for the agent loop `environment`, which scores them.

    Puzzles of the train split have even seeds, those of the test split odd ones.
    """
    import reasoning_gym

    rows = []
    for i in range(size):
        name = PUZZLES[i % len(PUZZLES)]
        puzzle_seed = 2 * (seed * 1_000_003 + i)
        if split == "test":
            puzzle_seed += 1
        dataset = reasoning_gym.create_dataset(name, size=1, seed=puzzle_seed)
        question = dataset[0]["question"]
        truth = json.dumps({"dataset": name, "seed": puzzle_seed})
        rows.append(_chat_row([("user", question)], truth) | {"agent_loop": "environment"})
    return rows


GENERATORS: dict[str, Callable[[str, int, int], list[Any]]] = {
    "word_problems": make,
    "addition": make_addition,
    "products": make_products,
    "puzzles": make_puzzles,
}


def default_test_size(name: str) -> int:
    """Held-out problems where the config asks for all: one per (operation, a, b) of the split, or
    256.
    """
    if name == "word_problems":
        return len(problems_of_split("test"))
    return DEFAULT_TEST_SIZE
