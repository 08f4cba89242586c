"""A dumped sample in parts: what the policy generated and is trained on, and what is context. And a
file's rows by episode, for the viewer and the report."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from one_step_off.data.samples import NOT_GENERATED, Sample

Row = dict[str, Any]

Decode = Callable[[np.ndarray], str]
"""Token ids, int32 [T], to text, special tokens included."""

CONTEXT = "context"  # a tool, the user or the agent wrote it
TRAINED = "trained"  # the policy generated it, and it is trained on
UNTRAINED = "untrained"  # the policy generated it, and it is left out of the loss
KINDS = (CONTEXT, UNTRAINED, TRAINED)


def parts_of_sample(sample: Sample, decode: Decode) -> list[Row]:
    """The parts of a response, in order: {"kind", "tokens", "text"} each, and "versions" where the
    policy generated it."""
    if not len(sample.response_ids):
        return []
    kinds = np.where(sample.versions == NOT_GENERATED, 0, 1)
    kinds[sample.loss_mask] = 2
    begins = np.flatnonzero(np.diff(kinds, prepend=-1))
    ends = [*begins[1:].tolist(), len(kinds)]
    parts: list[Row] = []
    for begin, end in zip(begins.tolist(), ends, strict=True):
        part: Row = {
            "kind": KINDS[kinds[begin]],
            "tokens": end - begin,
            "text": decode(sample.response_ids[begin:end]),
        }
        versions = set(sample.versions[begin:end].tolist()) - {NOT_GENERATED}
        if versions:
            part["versions"] = sorted(versions)
        parts.append(part)
    return parts


def has_parts(sample: Sample) -> bool:
    """Whether its parts say more than its response: it has context between its turns, or is one of
    several samples of an episode."""
    is_context = sample.versions == NOT_GENERATED
    return bool(is_context.any()) or "segment" in sample.extra


def rows_by_episode(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each episode, its segments in order; a row without "segment" is one of its
    own."""
    episodes: dict[Any, list[Row]] = {}
    for position, row in enumerate(rows):
        key: Any = position
        if isinstance(row.get("segment"), dict):
            key = (repr(row.get("prompt_id")), repr(row.get("index")))
        episodes.setdefault(key, []).append(row)
    for own in episodes.values():
        own.sort(key=lambda row: segment_of(row)[0])
    return list(episodes.values())


def segment_of(row: Row) -> tuple[int, int]:
    """(index, parent) of a row's segment, as whole numbers; (0, -1) for a row without one."""
    segment = row.get("segment")
    if not isinstance(segment, dict):
        return 0, -1
    index = segment.get("index")
    parent = segment.get("parent")
    return index if type(index) is int else 0, parent if type(parent) is int else -1


def parts_of_row(row: Row) -> list[Row]:
    """The parts of a dumped row that can be shown, as `parts_of_sample` makes them; [] where it has
    none."""
    parts = row.get("parts")
    shown = []
    for part in parts if isinstance(parts, list) else []:
        if not isinstance(part, dict) or part.get("kind") not in KINDS:
            continue
        tokens = part.get("tokens")
        versions = part.get("versions")
        shown.append(
            {
                "kind": part["kind"],
                "tokens": tokens if type(tokens) is int else 0,
                "text": str(part.get("text")),
                "versions": versions if isinstance(versions, list) else [],
            }
        )
    return shown


def image_files(row: Row) -> list[str]:
    """The files of a dumped row's images, below the run folder. Only names that a run writes: a row
    may not make the viewer read another file."""
    names = row.get("images")
    return [
        name
        for name in (names if isinstance(names, list) else [])
        if isinstance(name, str) and re.fullmatch(r"samples/images/[0-9a-f]{16}\.[a-z]+", name)
    ]


def tool_call_texts(row: Row) -> list[str]:
    """The tool calls of a dumped row, as "turn 0: calculator({...})"."""
    return [
        f"turn {call.get('turn')}: {call.get('name')}({call.get('arguments') or ''})"
        for call in _tool_calls(row)
    ]


def tool_names(row: Row) -> list[str]:
    """The tools that a dumped row calls, each once."""
    return list(dict.fromkeys(str(call.get("name")) for call in _tool_calls(row)))


def _tool_calls(row: Row) -> list[Row]:
    calls = row.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
