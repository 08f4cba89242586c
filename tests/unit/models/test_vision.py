"""The pixels that a process keeps."""

import io

import pytest
import torch
from PIL import Image

from one_step_off.models import vision


class Processor:
    """Makes ten numbers per picture, and counts the pictures."""

    calls = 0

    def __call__(self, images: list, return_tensors: str) -> dict[str, torch.Tensor]:
        self.calls += len(images)
        return {"pixel_values": torch.zeros(1, 10), "image_grid_thw": torch.ones(1, 3).long()}


def picture(shade: int) -> bytes:
    encoded = io.BytesIO()
    Image.new("L", (2, 2), shade).save(encoded, "PNG")
    return encoded.getvalue()


def test_pixels_are_kept_up_to_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "CACHED_BYTES", 100)
    images = vision.ImageProcessor.__new__(vision.ImageProcessor)
    images.processor = Processor()
    images.pixels, images.pixel_bytes = {}, 0
    for shade in (0, 1, 0, 1):
        images.pixels_of(picture(shade))
    assert images.processor.calls == 2
    images.pixels_of(picture(2))
    assert len(images.pixels) == 1 and images.pixel_bytes == 40
