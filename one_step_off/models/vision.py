"""Models that read images: which they are, and what their image processor makes of a file.

Engine and trainer use one image processor, that of transformers' AutoImageProcessor for the model:
the two that transformers has, by torchvision and by PIL, round differently.
"""

import shutil
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor
from transformers.utils import cached_file

from one_step_off.config.errors import as_config_error, key_error, value_error
from one_step_off.config.roles import load_hf_config
from one_step_off.config.schema import Config
from one_step_off.data.images import BadImage, open_image

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
"""The `model_type`s whose log-probs with images were proved to be those of their engine."""

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)

CACHED_BYTES = 256 << 20
"""Of the pixels that a process keeps: the samples of a prompt share them, and a step passes over
them several times."""


def is_vision_config(hf_config: Any) -> bool:
    """Whether it is the Hugging Face config of a model that can be trained on images."""
    return hf_config.model_type in FAMILIES


def policy_vision_config(cfg: Config) -> Any:
    """The Hugging Face config of the policy's model; None: it reads no images."""
    hf_config = load_hf_config(cfg, cfg.model.path)
    return hf_config if is_vision_config(hf_config) else None


def forbidden_tokens(hf_config: Any) -> list[int]:
    """The tokens that stand for parts of images and videos. The policy may generate none: a
    generated one would be read as a part of an image that is not there."""
    return [hf_config.image_token_id, hf_config.video_token_id]


class ImageProcessor:
    """The pixels and the number of tokens of images, for one model. See `data.images.ImageTokens`.

    Attributes:
        token_id: stands for each part of an image.
    """

    def __init__(self, path: str) -> None:
        """Raises ConfigError: the folder or hub id `path` has no image processor that can be
        loaded."""
        fix = "give a complete model; on CPUs run shell/setup.sh, which installs torchvision"
        with as_config_error(f"model.path={path}: its image processor cannot be loaded", fix):
            self.processor: Any = AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
        self.token_id: int = AutoConfig.from_pretrained(
            path, trust_remote_code=False
        ).image_token_id
        self.pixels: dict[bytes, tuple[Tensor, Tensor]] = {}
        self.pixel_bytes = 0

    def count(self, image: bytes) -> int:
        """See `ImageTokens`."""
        picture = open_image(image)
        try:
            patches = self.processor.get_number_of_image_patches(picture.height, picture.width, {})
        except ValueError as error:  # too narrow
            raise BadImage(f"an image cannot be used: {error}") from error
        return patches // self.processor.merge_size**2

    def pixels_of(self, image: bytes) -> tuple[Tensor, Tensor]:
        """Of one image: float32 [patches, numbers of a patch], and int64 [1, 3], its patches in
        time, height and width."""
        known = self.pixels.get(image)
        if known is not None:
            return known
        inputs = self.processor(images=[open_image(image)], return_tensors="pt")
        made = inputs["pixel_values"], inputs["image_grid_thw"]
        self.pixel_bytes += made[0].nbytes
        if self.pixel_bytes > CACHED_BYTES:
            self.pixels.clear()
            self.pixel_bytes = made[0].nbytes
        self.pixels[image] = made
        return made

    def inputs(self, images: Sequence[bytes]) -> dict[str, Tensor]:
        """The arguments of the model's forward pass for these images, in the order of their
        tokens."""
        pixels, grids = zip(*map(self.pixels_of, images), strict=True)
        return {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.cat(grids)}


def copy_processor(path: str, folder: str) -> None:
    """Copy the settings of a model's processors, so that the model in `folder` is served with the
    same. `path`: a folder or hub id."""
    for name in PROCESSOR_FILES:
        found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            shutil.copy(found, folder)


def check_limits(cfg: Config) -> None:
    """Refuse what a run with a model that reads images cannot do. Raises ConfigError."""
    roles = cfg.placement.roles
    if "rollout" not in roles:
        raise key_error(
            cfg, "model.path", "reads images, and supervised steps train text models; give another"
        )
    for role in ("critic", "reward_model", "teacher"):
        if role in roles:
            problem = f"{cfg.model.path} reads images, which this role cannot; remove the role"
            raise value_error(f"placement.roles.{role}", roles[role], problem)
    if "ref" in roles and cfg.ref.path not in ("", cfg.model.path):
        own, reference = (load_hf_config(cfg, path) for path in (cfg.model.path, cfg.ref.path))
        if getattr(own, "image_token_id", None) != getattr(reference, "image_token_id", None):
            raise key_error(cfg, "ref.path", f"does not read images as {cfg.model.path} does")
    for key, is_offered, fix in _limits(cfg):
        if not is_offered:
            raise key_error(cfg, key, f"{cfg.model.path} reads images; {fix}")


def _limits(cfg: Config) -> list[tuple[str, bool, str]]:
    """A key, whether its value is fine, and what to do."""
    return [
        ("actor.backend", cfg.actor.backend == "fsdp", "only the fsdp back end trains such models"),
        (
            "ref.backend",
            "ref" not in cfg.placement.roles or cfg.ref.backend in (None, "fsdp"),
            "only the fsdp back end scores with such models",
        ),
        (
            "rollout.engine",
            cfg.rollout.engine != "transformers",
            "only rollout.engine=vllm generates with such models",
        ),
        ("model.lora_rank", not cfg.model.lora_rank, "adapters are for text models; set it to 0"),
        (
            "actor.packing",
            cfg.actor.packing != "on",
            "its sequences are padded, because positions have three dimensions; use auto or off",
        ),
        (
            "weight_sync.in_flight",
            cfg.weight_sync.in_flight == "wait",
            "requests that go on over a sync would mix embeddings of old and new weights; use wait",
        ),
        (
            "rollout.engine_kwargs",
            "mm_processor_kwargs" not in cfg.rollout.engine_kwargs,
            "the trainer would make other pixels; set sizes in its preprocessor_config.json",
        ),
        ("model.trust_remote_code", not cfg.model.trust_remote_code, "set it to false"),
    ]
