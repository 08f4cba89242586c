"""Pictures of coloured shapes, and questions how many there are: `generator:shapes`.

Each cell of a grid holds a shape or nothing. A question counts the shapes of one colour.
"""

import io
import random
from typing import Any

from one_step_off.data.images import IMAGE_MARK

GRID = 3
CELL = 28
"""Pixels of a cell: what tiny:vision reads as one token."""

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220)}
MAX_COUNT = 4
"""Of one colour in a picture."""

FIGURES = ("circle", "square", "triangle")


def make_shapes(split: str, size: int, seed: int) -> list[dict[str, Any]]:
    """Rows with `prompt`, `images` (PNG) and `ground_truth`, each with a picture of its own."""
    rng = random.Random(f"shapes {split} {seed}")
    rows = []
    for _ in range(size):
        counts = {colour: rng.randrange(MAX_COUNT + 1) for colour in COLOURS}
        while sum(counts.values()) > GRID * GRID:
            counts[rng.choice(list(COLOURS))] = 0
        colour = rng.choice(list(COLOURS))
        rows.append(
            {
                "prompt": IMAGE_MARK + question(colour),
                "images": [picture(counts, rng)],
                "ground_truth": str(counts[colour]),
            }
        )
    return rows


def question(colour: str) -> str:
    """The text beside a picture."""
    return f"How many {colour} shapes are there?"


def picture(counts: dict[str, int], rng: random.Random) -> bytes:
    """A PNG with so many shapes of each colour, in cells and of forms by chance."""
    from PIL import Image, ImageDraw  # slow to import, and few runs need it

    image = Image.new("RGB", (GRID * CELL, GRID * CELL), "white")
    draw = ImageDraw.Draw(image)
    colours = [colour for colour, count in counts.items() for _ in range(count)]
    for cell, colour in zip(rng.sample(range(GRID * GRID), len(colours)), colours, strict=True):
        row, column = divmod(cell, GRID)
        margin = rng.randrange(3, 8)
        left, top = column * CELL + margin, row * CELL + margin
        right, bottom = (column + 1) * CELL - margin, (row + 1) * CELL - margin
        _draw(draw, rng.choice(FIGURES), (left, top, right, bottom), COLOURS[colour])
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _draw(draw: Any, figure: str, box: tuple[int, int, int, int], colour: Any) -> None:
    left, top, right, bottom = box
    if figure == "circle":
        draw.ellipse(box, fill=colour)
    elif figure == "square":
        draw.rectangle(box, fill=colour)
    else:
        draw.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=colour)
