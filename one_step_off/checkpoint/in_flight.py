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
        for row in state["batches"]
    ]
    pool = []
    for row in state["pool"]:
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
