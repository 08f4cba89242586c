"""`model.path: tiny:vision`: a small Qwen2.5-VL that counts coloured shapes, built on demand.

It is warm-started on the pictures of `generator:shapes`, as tiny:qwen2 is on word problems: it
learns to count, and seldom writes the number in the form that earns the reward.
"""

import hashlib
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from one_step_off.data import shapes
from one_step_off.data.images import IMAGE_MARK
from one_step_off.models import tiny_qwen
from one_step_off.models.tiny_qwen import EOS, IGNORED_LABEL, PAD, Progress
from one_step_off.models.vision import ImageProcessor

VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE = "<|image_pad|>"
VIDEO = "<|video_pad|>"

# As tiny_qwen.CHAT_TEMPLATE, with images.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}Question: {% elif message['role'] == 'assistant' %}Answer: "
    "{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + VISION_START + IMAGE + VISION_END + "{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}" + EOS + "{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)

ENDINGS = {"\n#### {n}": 0.3, "": 0.55, "\n{n}": 0.15}
"""What follows the number in a demonstration, with its probability: only the first earns the
reward."""

VOCAB_SIZE = 320
STEPS = 240
BATCH_SIZE = 64
ROWS = 4096
DATA_SEED = 1234


def ensure(seed: int = 0, progress: Progress = tiny_qwen.ignore_progress) -> str:
    """A local directory with the warm-started model, built once, later found in the cache.

    `seed`: of weights and warm start, not of a run.
    """
    sources = [Path(module.__file__ or "").read_text() for module in (tiny_qwen, shapes)]
    text = "".join([str(seed), Path(__file__).read_text(), *sources])
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return tiny_qwen.cached(f"tiny-vision-{digest}", lambda path: build(path, seed, progress))


def build(
    path: str, seed: int = 0, progress: Progress | None = None, kind: str = "qwen2_5_vl"
) -> str:
    """Write the model with tokenizer and image processor into `path`, as one HF model directory.

    Args:
        progress: receives the progress of the warm start; None: the weights stay random.
        kind: a `model_type` of `vision.FAMILIES`.

    Returns:
        `path`.
    """
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed, kind)
    model.generation_config.update(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    tokenizer.save_pretrained(path)
    pixels = (shapes.CELL * shapes.GRID) ** 2
    size = {"shortest_edge": shapes.CELL**2, "longest_edge": 4 * pixels}
    patch = model.config.vision_config.patch_size
    Qwen2VLImageProcessorPil(size=size, patch_size=patch).save_pretrained(path)
    model.save_pretrained(path)  # the image processor reads the token of images from its config
    if progress:
        warm_start(model, tokenizer, ImageProcessor(path), seed, progress)
        model.save_pretrained(path)
    return path


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on the questions; any text round-trips."""
    core = ByteLevelBPETokenizer()
    corpus = [f"Question: {shapes.question(colour)}\nAnswer: 1" for colour in shapes.COLOURS]
    special_tokens = [PAD, EOS, VISION_START, VISION_END, IMAGE, VIDEO]
    core.train_from_iterator(
        corpus * 10, VOCAB_SIZE, 0, show_progress=False, special_tokens=special_tokens
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core._tokenizer,
        clean_up_tokenization_spaces=False,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=special_tokens[2:],
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, kind: str) -> PreTrainedModel:
    """A randomly initialized fp32 model, 600k parameters."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    text: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "max_position_embeddings": 2048,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
        "initializer_range": tiny_qwen.RECIPE.initializer_range,
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": shapes.CELL // 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 128,
        "initializer_range": tiny_qwen.RECIPE.initializer_range,
    }
    if kind == "qwen3_vl":
        text |= {"head_dim": 64}
        text["rope_parameters"] = rope | {"mrope_section": [12, 10, 10], "mrope_interleaved": True}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    else:
        text["rope_parameters"] = rope | {"mrope_section": [8, 12, 12]}
        vision |= {"window_size": 2 * shapes.CELL, "fullatt_block_indexes": [1]}
    names = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}
    config = AutoConfig.for_model(
        kind, text_config=text, vision_config=vision, tie_word_embeddings=True, **ids
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        torch.manual_seed(seed)
        return AutoModelForImageTextToText.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )


def warm_start(
    model: PreTrainedModel,
    tokenizer: Any,
    processor: ImageProcessor,
    seed: int,
    progress: Progress,
) -> None:
    """Supervised fine-tuning on demonstrations, in place. The loss is on the answers only."""
    rng = random.Random(seed)
    rows = shapes.make_shapes("train", ROWS, DATA_SEED)
    optimizers = tiny_qwen.optimizers_of(model)
    schedules = [tiny_qwen.schedule_of(optimizer, STEPS) for optimizer in optimizers]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for step in range(STEPS):
        chosen = rng.sample(rows, BATCH_SIZE)
        endings = rng.choices(list(ENDINGS), list(ENDINGS.values()), k=BATCH_SIZE)
        loss = _supervised_loss(model, tokenizer, processor, chosen, endings)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), tiny_qwen.RECIPE.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        model.zero_grad()
        progress("building tiny:vision (once, then cached)", (step + 1) / STEPS)
    torch.set_num_threads(threads)


def _supervised_loss(
    model: Any,
    tokenizer: Any,
    processor: ImageProcessor,
    rows: list[dict[str, Any]],
    endings: list[str],
) -> Tensor:
    """Mean cross-entropy of the answers."""
    sequences = []
    labels = []
    for row, ending in zip(rows, endings, strict=True):
        (image,) = row["images"]
        tokens = VISION_START + IMAGE * processor.count(image) + VISION_END
        text = row["prompt"].replace(IMAGE_MARK, tokens)
        prompt = tokenizer.encode(f"Question: {text}\nAnswer:", add_special_tokens=False)
        answer = f" {row['ground_truth']}{ending.format(n=row['ground_truth'])}"
        answer_ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        sequences.append(torch.tensor(prompt + answer_ids))
        labels.append(torch.tensor([IGNORED_LABEL] * len(prompt) + answer_ids))
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    targets = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL)
    inputs = processor.inputs([row["images"][0] for row in rows])
    is_image = (ids == processor.token_id).long()
    positions, _ = model.model.get_rope_index(
        ids, mm_token_type_ids=is_image, image_grid_thw=inputs["image_grid_thw"]
    )
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, **inputs).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED_LABEL
    )
