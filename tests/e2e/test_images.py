"""Training on images through the whole program: a tiny model learns to write what it sees, and a
random one trains on rows with and without images, is saved and served again."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.data.images import open_image
from one_step_off.data.shapes import make_shapes
from one_step_off.models import tiny_vision
from tests.conftest import tiny_config
from tests.e2e.rewards import LETTER_SHARE
from tests.e2e.run_folder import model_weights, read_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CANARY_TOLERANCE = 1e-5  # embeddings of older weights show as 0.25 and more


def run(cfg: Config) -> None:
    from one_step_off.runtime import launch

    pytest.importorskip("torchvision", reason="vLLM reads images with it: shell/setup.sh")
    assert launch.run(cfg) == 0


def assert_synced_exactly(folder: Path) -> None:
    """Each sync left the engine with the trainer's log-probs of prompts with images."""
    rows = read_rows(folder, "metrics.jsonl")
    assert max(row["canary/logprob_diff_max"] for row in rows) < CANARY_TOLERANCE
    assert rows[0]["logprob_diff/max"] < 5e-5  # of what it generated with these weights
    assert rows[-1]["sync/in_place"] == 1.0


@pytest.mark.ci
def test_a_tiny_model_learns_to_write_what_it_counts(tmp_path):
    cfg = load_config([f"config={ROOT}/config/shapes_tiny_cpu.yaml"])
    cfg.trainer.output_dir = str(tmp_path)
    run(cfg)
    assert_synced_exactly(tmp_path)
    rewards = [row["val/reward"] for row in read_rows(tmp_path, "evaluations.jsonl")]
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.7
    (row, *_) = read_rows(tmp_path, "samples/step_000000.jsonl")
    assert (tmp_path / row["images"][0]).read_bytes().startswith(b"\x89PNG")


def mixed_rows(folder: Path) -> str:
    """Rows with one image, with two, and without."""
    rows = []
    for i, row in enumerate(make_shapes("train", 24, 0)):
        buffer = io.BytesIO()
        # Of a size that the image processor must change.
        open_image(row["images"][0]).resize((100, 61)).save(buffer, "PNG")
        image = base64.b64encode(buffer.getvalue()).decode()
        if i % 3 == 0:
            prompt, images = f"Sort these numbers: {' '.join(map(str, range(i)))}", []
        else:
            prompt, images = "<image>" * (i % 3) + " How many?", [image] * (i % 3)
        rows.append({"prompt": prompt, "images": images, "ground_truth": row["ground_truth"]})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config_of(model: str, folder: Path, data: str, ranks: int) -> Config:
    settings = {
        "data.train_files": data,
        "data.val_files": "",
        "data.max_prompt_length": 160,
        "reward.function": LETTER_SHARE,
        "placement.pools": {"rollout": [1], "actor": [ranks]},
        "model.freeze": ["visual"] if ranks == 2 else [],
    }
    return tiny_config(model, str(folder), **settings)


def test_rows_with_and_without_images_train_on_two_ranks(tmp_path):
    model = tiny_vision.build(str(tmp_path / "model"), kind="qwen3_vl")
    data = mixed_rows(tmp_path)
    folder = tmp_path / "run"
    run(config_of(model, folder, data, ranks=2))
    assert_synced_exactly(folder)

    stored = load_file(f"{model}/model.safetensors")
    trained = model_weights(folder)
    assert {n: t.shape for n, t in trained.items()} == {n: t.shape for n, t in stored.items()}
    same = {name for name in stored if torch.equal(stored[name], trained[name])}
    assert same == {name for name in stored if "visual" in name}

    # The first sync of another run compares what vLLM loaded with what the trainer loaded.
    served = tmp_path / "served"
    run(config_of(str(folder / "hf_model"), served, data, ranks=1))
    assert_synced_exactly(served)
