"""Samples of agents' episodes, as a run dumps them: a tree of segments, a conversation with a tool,
and texts that try to break out of the page."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from one_step_off.data.samples import NOT_GENERATED, Prompt, Sample
from one_step_off.monitoring.loggers import LogEntry, SampleDump

Part = tuple[str, str]
"""The kind of a part, "c" context, "t" trained or "u" generated and not trained, and its text."""


def encode(text: str) -> np.ndarray:
    """One token per character."""
    return np.array([ord(character) for character in text], np.int32)


def decode(ids: np.ndarray) -> str:
    return "".join(map(chr, ids))


def sample_of(
    prompt: str, parts: list[Part], index: int = 0, reward: float = 1.0, version: int = 3, **extra
) -> Sample:
    """Sample `index` of prompt (0, 7): its context `prompt`, then these parts."""
    kinds = "".join(kind * len(text) for kind, text in parts)
    generated = np.array([kind != "c" for kind in kinds], bool)
    return Sample(
        (0, 7),
        index,
        encode(prompt),
        response_ids=encode("".join(text for _, text in parts)),
        log_probs=np.zeros(len(kinds), np.float32),
        loss_mask=np.array([kind == "t" for kind in kinds], bool),
        versions=np.where(generated, version, NOT_GENERATED).astype(np.int32),
        reward=reward,
        finish_reason="stop",
        response="".join(text for _, text in parts),
        extra=extra,
    )


def segment(index: int, count: int, parent: int) -> dict:
    return {"index": index, "count": count, "parent": parent}


SYSTEM = "<system>You are a careful assistant. Tools: search(query), calculator(expression).</s>"
TASK = SYSTEM + "<user>How many tiles of 30 cm cover a hall of 12 m by 9 m, with 5% waste?</s>"


def deep_episode(index: int, reward: float, last: str) -> list[Sample]:
    """An agent that asks a helper, then compacts its history: four segments."""
    call = {"turn": 0, "name": "calculator", "arguments": '{"expression": "12 * 9 / 0.09"}'}
    more = {"index": index, "reward": reward}
    return [
        sample_of(
            TASK + "<assistant>",
            [
                ("t", "I compute the area first.\n<call>calculator 12 * 9 / 0.09</call></s>"),
                ("c", "<tool>1200.0</s><assistant>"),
                ("t", "Then I let a helper check how waste is counted.</s>"),
                ("c", "<tool>the helper says: round up after adding the waste</s><assistant>"),
                ("t", "So 1200 * 1.05 = 1260.</s>"),
            ],
            segment=segment(0, 4, -1),
            tool_calls=[call],
            **more,
        ),
        sample_of(
            SYSTEM + "<user>How is waste counted when one buys tiles?</s><assistant>",
            [
                ("t", "<call>search tile waste</call></s>"),
                (
                    "c",
                    "<tool>" + "One adds a share for cuts and breakage. " * 9 + "</s><assistant>",
                ),
                ("t", "Add the share to the count, then round up.</s>"),
            ],
            segment=segment(1, 4, -1),
            tool_calls=[{"turn": 0, "name": "search", "arguments": '{"query": "tile waste"}'}],
            **more,
        ),
        sample_of(
            TASK + "<assistant>I compute the area first.</s><user>Summary so far: 1260 tiles, "
            "unchecked.</s><assistant>",
            [("t", "I check it: 1260 tiles cover 113.4 square meters.</s>")],
            segment=segment(2, 4, 0),
            version=4,
            **more,
        ),
        sample_of(
            TASK + "<user>Summary: 1260 tiles, checked. Answer now.</s><assistant>",
            [("u", "<think>Nothing is left.</think>"), ("t", last)],
            segment=segment(3, 4, 2),
            version=4,
            **more,
        ),
    ]


def conversation(index: int, reward: float, answer: str = "41") -> list[Sample]:
    """An episode of one segment with one call of a tool."""
    parts = [
        ("t", "<call>calculator 12 + 30</call></s>"),
        ("c", "<tool>42</s><assistant>"),
        ("t", f"The answer is {answer}.</s>"),
    ]
    call = {"turn": 0, "name": "calculator", "arguments": '{"expression": "12 + 30"}'}
    return [sample_of(TASK + "<assistant>", parts, index=index, reward=reward, tool_calls=[call])]


def samples_of_step() -> list[Sample]:
    """Three episodes of one prompt: the best and the largest, one of two segments, the worst."""
    return [
        *deep_episode(0, 1.0, "The answer is 1260.</s>"),
        *conversation(1, 0.0),
        *[s for s in deep_episode(2, 0.5, "1261</s>")[:2] if _count_two(s)],
    ]


def _count_two(sample: Sample) -> bool:
    sample.extra["segment"]["count"] = 2
    return True


def dump(folder: Path, step: int, samples: list[Sample]) -> None:
    prompt = Prompt((0, 7), encode(TASK + "<assistant>"), TASK, "1260")
    writer = SampleDump(folder, {(0, 7): prompt}.get, decode)
    writer.write(LogEntry({}, step, False, samples))
