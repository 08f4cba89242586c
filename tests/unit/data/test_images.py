"""Rows with images: where they come from, how they are marked, counted and refused."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import DataConfig
from one_step_off.data.images import BadImage, marked_columns, messages_with_parts, open_image
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.rows import DataReport, load_rows
from one_step_off.data.shapes import CELL, GRID, make_shapes, picture
from one_step_off.data.tokenization import tokenize_rows
from one_step_off.models import tiny_vision
from one_step_off.models.vision import ImageProcessor

RED = picture({"red": 2}, random.Random(0))
BLUE = picture({"blue": 1}, random.Random(1))
TEXT_URL = "data:image/png;base64," + base64.b64encode(RED).decode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_vision.build(str(tmp_path_factory.mktemp("images") / "model"))


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    ("columns", "content", "images"),
    [
        # verl's data: marks in the text, images in a column.
        (
            {"prompt": [{"role": "user", "content": "a<image>b<image>"}], "images": [RED, BLUE]},
            "a<image>b<image>",
            (RED, BLUE),
        ),
        # TRL's: parts without pictures, and a column.
        (
            {"prompt": user({"type": "image"}, text("How many?")), "images": [RED]},
            "<image>How many?",
            (RED,),
        ),
        # TRL's: text alone, and a column.
        (
            {"prompt": [{"role": "user", "content": "How many?"}], "image": RED},
            "<image>How many?",
            (RED,),
        ),
        # OpenAI's two APIs.
        (
            {"prompt": user(text("see "), {"type": "image_url", "image_url": {"url": TEXT_URL}})},
            "see <image>",
            (RED,),
        ),
        (
            {"prompt": user({"type": "input_image", "image_url": TEXT_URL}, text("!"))},
            "<image>!",
            (RED,),
        ),
        # What the datasets library stores.
        (
            {"prompt": user({"type": "image", "image": {"bytes": BLUE, "path": None}})},
            "<image>",
            (BLUE,),
        ),
    ],
)
def test_the_forms_of_other_trainers_are_read(columns, content, images):
    rest, found = marked_columns(columns | {"ground_truth": "1"}, "")
    assert [message["content"] for message in rest["prompt"]] == [content]
    assert found == images
    assert rest.keys() == {"prompt", "ground_truth"}


def test_plain_prompts_questions_and_files(tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    columns = {"question": "How many?", "images": ["red.png"], "answer": "2"}
    rest, images = marked_columns(columns, str(tmp_path))
    assert (rest["question"], images) == ("<image>How many?", (RED,))
    encoded = base64.b64encode(BLUE).decode()
    rest, images = marked_columns({"prompt": "x <image>", "images": [encoded]}, "")
    assert (rest["prompt"], images) == ("x <image>", (BLUE,))


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"prompt": "<image> <image>", "images": [RED]}, "2 marks <image>, not 1"),
        ({"prompt": "<image>", "images": [RED, BLUE]}, "places for fewer"),
        ({"prompt": user({"type": "image"})}, "more places for images than the row has"),
        ({"prompt": "x", "images": ["gone.png"]}, "no such file"),
        ({"prompt": "x", "images": ["https://example.org/a.png"]}, "are not downloaded"),
        ({"prompt": user({"type": "image"}, {"type": "audio"}), "images": [RED]}, "only have text"),
    ],
)
def test_what_does_not_fit_is_named(columns, problem):
    with pytest.raises(BadImage, match=problem):
        marked_columns(columns, "")


def test_templates_receive_parts():
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "a<image><image>b"}]
    system, message = messages_with_parts(chat)
    assert system == chat[0]
    kinds = [part["type"] for part in message["content"]]
    assert kinds == ["text", "image", "image", "text"]


def test_pictures_are_upright_and_without_transparency():
    tall = Image.new("RGBA", (10, 30), (255, 0, 0, 255))
    buffer = io.BytesIO()
    exif = tall.getexif()
    exif[0x0112] = 6  # the camera was turned
    tall.save(buffer, "PNG", exif=exif)
    assert (open_image(buffer.getvalue()).size, open_image(buffer.getvalue()).mode) == (
        (30, 10),
        "RGB",
    )
    with pytest.raises(BadImage, match="is no picture"):
        open_image(b"not a picture")


def prompts_of(rows: list[Any], model: str, folder: Path, **settings: Any) -> Any:
    import transformers

    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = DataConfig(**settings)
    report = DataReport("data")
    loaded = load_rows(str(path), "train", cfg, 0, report, reads_images=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    prompts = tokenize_rows(loaded, tokenizer, cfg, 0, report, images=ImageProcessor(model))
    return prompts, report


def test_images_are_counted_as_tokens_and_never_cut(model, tmp_path):
    small = {"prompt": "<image>How many?", "images": [TEXT_URL], "ground_truth": "2"}
    two = {"prompt": "<image><image>?", "images": [TEXT_URL] * 2, "ground_truth": "2"}
    plain = {"prompt": "How many?", "ground_truth": "2"}
    broken = {"prompt": "<image>?", "images": [base64.b64encode(b"x" * 80).decode()]}
    rows = [small, two, plain, broken | {"ground_truth": "2"}]
    prompts, report = prompts_of(rows, model, tmp_path, max_prompt_length=128)
    token = ImageProcessor(model).token_id
    assert [int((prompt.ids == token).sum()) for prompt in prompts] == [9, 18, 0]
    assert [len(prompt.images) for prompt in prompts] == [1, 2, 0]
    assert "images" not in prompts[0].extra
    ((where, reason),) = report.bad
    assert where.endswith(":4")
    assert "no picture" in reason
    longest = len(prompts[0].ids)
    prompts, report = prompts_of(rows[:3], model, tmp_path, max_prompt_length=longest)
    assert [len(prompt.images) for prompt in prompts] == [1, 0]
    assert [tokens > longest for _, tokens in report.overlong] == [True]
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: .* tokens, more than"):
        prompts_of(rows[:3], model, tmp_path, max_prompt_length=longest, overlong_prompts="fail")


def test_text_that_names_the_token_of_images_is_refused(model, tmp_path):
    rows = [
        {"prompt": "x <|image_pad|>", "ground_truth": "1"},
        {"prompt": "y", "ground_truth": "1"},
    ]
    prompts, report = prompts_of(rows, model, tmp_path)
    assert len(prompts) == 1
    assert report.bad[0][1] == "it has 0 images, and its text has 1 image tokens"


def test_a_resumed_run_notices_other_images(model, tmp_path):
    rows = [{"prompt": "<image>?", "images": [TEXT_URL], "ground_truth": "2"}]
    prompts, _ = prompts_of(rows, model, tmp_path)
    state = PromptStream(prompts, 1, False, 0, 1).state_dict()
    rows[0]["images"] = [base64.b64encode(BLUE).decode()]
    others, _ = prompts_of(rows, model, tmp_path)
    assert np.array_equal(others[0].ids, prompts[0].ids)
    with pytest.raises(ConfigError, match="other prompts"):
        PromptStream(others, 1, False, 0, 1).check_state(state)


def test_a_text_model_refuses_rows_with_marks():
    report = DataReport("data")
    with pytest.raises(ConfigError, match="column 'images': only text can be trained on"):
        load_rows("generator:shapes", "train", DataConfig(), 0, report)


def test_the_generated_pictures_show_what_they_say():
    rows = make_shapes("train", 12, 0)
    assert rows == make_shapes("train", 12, 0)
    assert rows != make_shapes("test", 12, 0)
    assert open_image(rows[0]["images"][0]).size == (GRID * CELL, GRID * CELL)
    assert {row["ground_truth"] for row in rows} <= set("01234")
