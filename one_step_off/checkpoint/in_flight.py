"""What is in flight between rollout and training, as a checkpoint holds it: samples, and what
`state.json` says of them.

The samples of all complete batches come first, then those of the complete prompts of a pool.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from one_step_off.data.samples import Prompt, PromptId, Sample
from one_step_off.rollout.batch_sources import FinishedBatch, InFlight
from one_step_off.rollout.prompt_pool import PooledPrompt

FindPrompt = Callable[[PromptId], Prompt]


def samples_and_state(in_flight: InFlight) -> tuple[list[Sample] | None, dict[str, Any]]:
    """All complete samples (None: there are none), and the entries of `state.json`."""
    samples: list[Sample] = []
    batches = []
    for batch in in_flight.batches:
        samples += batch.samples
        batches.append(
            {
                "step": batch.step,
                "version": batch.version,
                "incarnation": batch.attempt,
                "generate_s": batch.generate_s,
                "samples": len(batch.samples),
            }
        )
    pool = []
    for entry in in_flight.pool:
        complete = entry.samples or []
        samples += complete
        pool.append(
            {
                "prompt": list(entry.prompt.id),
                "turn": entry.turn,
                "version": entry.version,
                "notes": entry.notes,
                "samples": len(complete),
            }
        )
    past = {str(attempt): version for attempt, version in in_flight.past.items()}
    return samples or None, {"batches": batches, "pool": pool, "past": past}


def restored_in_flight(
    state: dict[str, Any], samples: list[Sample], find_prompt: FindPrompt
) -> InFlight:
    """What a checkpoint holds.

    Args:
        state: of its `state.json`. Checkpoints of earlier releases have one batch at most, and of a
            pool only the ids of its prompts.
        samples: of its files; [] where it has none.
        find_prompt: returns the prompt of an id.
    """
    if "batches" in state:
        rows, pool_rows = state["batches"], state["pool"]
    else:
        rows, pool_rows = _rows_of_one_batch(state, len(samples)), _rows_of_prompts(state)
    remaining = iter(samples)

    def take(count: int) -> list[Sample]:
        return [next(remaining) for _ in range(count)]

    batches = [
        FinishedBatch(
            step=row["step"],
            samples=take(row["samples"]),
            version=row["version"],
            attempt=row["incarnation"],
            generate_s=row["generate_s"],
        )
        for row in rows
    ]
    pool = []
    for row in pool_rows:
        prompt_id = tuple(row["prompt"])
        pool.append(
            PooledPrompt(
                prompt=replace(find_prompt(prompt_id), id=prompt_id),
                turn=row["turn"],
                version=row["version"],
                samples=take(row["samples"]) or None,
                notes=row["notes"],
            )
        )
    past = {int(attempt): version for attempt, version in state.get("past", {}).items()}
    # The versions up to this step of the run that wrote the checkpoint led to its weights.
    past[state["incarnation"]] = state["step"]
    return InFlight(batches, pool, past)


def _rows_of_one_batch(state: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The batch of a checkpoint of an earlier release: its samples were made with the weights of
    the step before."""
    if not count:
        return []
    step = state["step"]
    return [
        {
            "step": step,
            "version": max(0, step - 1),
            "incarnation": state["incarnation"],
            "generate_s": state["generate_s"],
            "samples": count,
        }
    ]


def _rows_of_prompts(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The unfinished prompts of a checkpoint of an earlier release."""
    step = state["step"]
    return [
        {"prompt": prompt, "turn": step, "version": step, "notes": {}, "samples": 0}
        for prompt in state.get("carried", ())
    ]
