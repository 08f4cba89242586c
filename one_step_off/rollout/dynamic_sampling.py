"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): groups whose episodes all score alike are
replaced by the groups of new prompts."""

from typing import Any

from one_step_off.algorithms import advantages
from one_step_off.data.difficulty import replaced_visits
from one_step_off.data.samples import PromptId, Sample
from one_step_off.data.token_work import generation_work, replaced_work


def uninformative_prompts(samples: list[Sample]) -> list[PromptId]:
    """The prompts whose episodes all score alike, greedy responses aside. Groups with errors are
    not among them: they stay, to be counted and seen."""
    sampled = [s for s in samples if "greedy" not in s.extra]
    rewards = [s.reward for s in sampled]
    groups = [s.prompt_id for s in sampled]
    with_errors = {s.prompt_id for s in samples if "error" in s.extra}
    return [
        prompt
        for prompt in advantages.zero_variance_groups(rewards, groups)
        if prompt not in with_errors
    ]


def notes_of_replaced(
    stream: Any, prompts: list[PromptId], removed: list[Sample]
) -> dict[str, Any]:
    """Which groups were replaced, for the ledger and for checkpoints: extras of the first sample of
    the new groups.

    Args:
        stream: the prompts, see `PromptStream`.
        prompts: whose groups were replaced.
        removed: the samples of these groups. Those that carried such notes themselves hand them on.
    """
    earlier = [prompt for s in removed for prompt in s.extra.get("replaces", ())]
    notes: dict[str, Any] = {"replaces": earlier + [list(prompt) for prompt in prompts]}
    notes["replaced_work"] = list(generation_work(removed).plus(replaced_work(removed)))
    visits = replaced_visits(removed) + stream.visits(removed)
    if visits:
        notes["replaced_visits"] = visits
    return notes
