"""The images of a row: found in its columns and messages, read as encoded bytes, and marked in the
text.

A message stays text: `<image>` stands where an image is, as in the data of verl. Only the chat
template receives parts (`messages_with_parts`). Images travel as the bytes of their files, once per
prompt; engine and trainer open the same bytes with `open_image`.
"""

import base64
import binascii
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

IMAGE_MARK = "<image>"
IMAGE_COLUMNS = ("images", "image")
IMAGE_PARTS = ("image", "image_url", "input_image")
"""The parts of a message that are images, in the data of TRL and in OpenAI's two APIs."""

Images = tuple[bytes, ...]
"""The encoded files of a row's images, in the order of their marks."""


class BadImage(ValueError):
    """Why an image cannot be used."""


class ImageTokens(Protocol):
    """What a model makes of images, see `models.vision.ImageProcessor`."""

    token_id: int
    """Stands for each part of an image."""

    def count(self, image: bytes) -> int:
        """How many tokens an image has. Raises BadImage."""
        ...


def open_image(image: bytes) -> Any:
    """The picture, as an RGB image of PIL, upright as its camera says. Raises BadImage."""
    from PIL import Image, ImageOps  # slow to import, and few runs need it

    try:
        return ImageOps.exif_transpose(Image.open(io.BytesIO(image))).convert("RGB")
    except Exception as error:  # broken files raise errors of many types
        raise BadImage(f"is no picture that PIL reads ({error})") from error


def marked_columns(columns: dict[str, Any], folder: str) -> tuple[dict[str, Any], Images]:
    """A row's columns without images, with marks in the prompt; and the images.

    Images come from the columns "images" or "image", one for each mark or part without a picture of
    its own; where the prompt has none, they stand before the first user's text.

    Args:
        folder: relative paths begin there.

    Raises:
        BadImage: an image cannot be read, or there are more or fewer than places for them.
    """
    rest = {name: value for name, value in columns.items() if name not in IMAGE_COLUMNS}
    given = _given_images(columns)
    name = "question" if "question" in rest and "prompt" not in rest else "prompt"
    name = name if name in rest else "problem"
    sources: list[Any] = []
    waiting = list(given)
    content = rest.get(name)
    if isinstance(content, (list, tuple)):
        messages = [_marked_message(message, waiting, sources) for message in content]
        if waiting and not sources:
            _mark_first_message(messages, waiting, sources)
        rest[name] = messages
    elif isinstance(content, str) and given:
        places = content.count(IMAGE_MARK)
        rest[name] = content if places else f"{IMAGE_MARK * len(given)}{content}"
        sources, waiting = waiting[:places] if places else waiting, waiting[places or len(given) :]
        if places > len(sources):
            raise BadImage(f"column {name!r} has {places} marks {IMAGE_MARK}, not {len(given)}")
    if waiting:
        raise BadImage(f"has {len(given)} images, and its prompt has places for fewer")
    return rest, tuple(read_image(source, folder) for source in sources)


def _given_images(columns: Mapping[str, Any]) -> list[Any]:
    given = columns.get("images")
    if given is None:
        given = columns.get("image")
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _marked_message(message: Any, waiting: list[Any], sources: list[Any]) -> Any:
    """The message as text with marks. Moves each image from `waiting` to `sources`, in order."""
    if not isinstance(message, Mapping):
        return message
    content = message.get("content")
    if isinstance(content, str):
        for _ in range(content.count(IMAGE_MARK)):
            sources.append(_next_image(waiting))
        return message
    if not isinstance(content, (list, tuple)):
        return message
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in content]
    if not any(kind in IMAGE_PARTS for kind in kinds):
        return message
    texts: list[str] = []
    for kind, part in zip(kinds, content, strict=True):
        if kind in IMAGE_PARTS:
            source = _source_of_part(part)
            sources.append(_next_image(waiting) if source is None else source)
            texts.append(IMAGE_MARK)
        else:
            texts.append(_text_beside_images(part))
    return {**message, "content": "".join(texts)}


def _text_beside_images(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str) or IMAGE_MARK in text:
        raise BadImage(
            f"beside images a message may only have text without marks, not {text!r:.40}"
        )
    return text


def _source_of_part(part: Mapping[str, Any]) -> Any:
    """The picture that a part names; None: the next one of the row's column."""
    for name in IMAGE_PARTS:
        source = part.get(name)
        if isinstance(source, Mapping) and "url" in source:
            source = source["url"]
        if source is not None:
            return source
    return part.get("url") or part.get("path")


def _next_image(waiting: list[Any]) -> Any:
    if not waiting:
        raise BadImage("its prompt has more places for images than the row has images")
    return waiting.pop(0)


def _mark_first_message(messages: list[Any], waiting: list[Any], sources: list[Any]) -> None:
    """Put marks of all waiting images before the text of the first user."""
    for i, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, str):
                marks = IMAGE_MARK * len(waiting)
                messages[i] = {**message, "content": f"{marks}{content}"}
                sources += waiting
                waiting.clear()
            return


def read_image(source: Any, folder: str) -> bytes:
    """The encoded bytes of an image.

    Args:
        source: the bytes, a path, a data URL, base64 text, the {"bytes", "path"} of the datasets
            library, or a picture of PIL.
        folder: relative paths begin there.

    Raises:
        BadImage: there is no such file, or it is no image.
    """
    if isinstance(source, Mapping):
        bytes_or_path = source.get("bytes")
        source = source.get("path") if bytes_or_path is None else bytes_or_path
    if hasattr(source, "save"):
        buffer = io.BytesIO()
        source.save(buffer, "PNG")
        source = buffer.getvalue()
    if isinstance(source, str):
        source = _bytes_of_text(source, folder)
    if not isinstance(source, (bytes, bytearray)):
        raise BadImage(f"an image is {source!r:.40}: not bytes, a path or base64")
    return bytes(source)


def _bytes_of_text(source: str, folder: str) -> bytes:
    scheme, separator, data = source.partition(",")
    if scheme.startswith("data:") and separator:
        return _decoded(data)
    if source.startswith(("http://", "https://")):
        raise BadImage(f"an image is {source:.60}: images are not downloaded; give its file")
    path = source.removeprefix("file://")
    path = os.path.join(folder, os.path.expanduser(path))
    if len(source) < 4096 and os.path.isfile(path):
        with open(path, "rb") as file:
            return file.read()
    if os.path.splitext(source)[1] or len(source) < 64:
        raise BadImage(f"an image is {source!r:.80}: there is no such file")
    return _decoded(source)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadImage(f"an image is {text[:20]!r}...: neither a path nor base64") from error


def messages_with_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as the chat templates of models with images take them: a content with marks is a
    list of parts."""
    chat = []
    for message in messages:
        content = message["content"]
        if IMAGE_MARK not in content:
            chat.append(message)
            continue
        parts: list[dict[str, Any]] = []
        first, *others = content.split(IMAGE_MARK)
        if first:
            parts.append({"type": "text", "text": first})
        for text in others:
            parts.append({"type": "image"})
            if text:
                parts.append({"type": "text", "text": text})
        chat.append(message | {"content": parts})
    return chat


def media_type(image: bytes) -> str:
    """The type of an image for a data URL, by its first bytes."""
    if image.startswith(b"\x89PNG"):
        return "image/png"
    if image.startswith(b"GIF8"):
        return "image/gif"
    if image[8:12] == b"WEBP":
        return "image/webp"
    return "image/jpeg"
