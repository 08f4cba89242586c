"""Summaries of metrics: statistics of samples, medians and rates of a run, and the text of an
evaluation."""

import math
from typing import Any

import numpy as np

from one_step_off.data.episodes import agent_counts, group_by_episode, one_per_episode
from one_step_off.data.samples import AGENT_ERROR, FAULT_METRICS, TIME_PARTS, Sample

Row = dict[str, Any]
MEDIAN_PREFIXES = (
    *("time/", "tokens_per_s/", "flops_per_s/", "mfu/", "gpu_utilisation/"),
    "rollout/acceptance_",
)
# When a phase began and ended: a median of that says nothing.
TIMESTAMP_SUFFIXES = ("_begin_s", "_end_s")
MAX_AVERAGED_STEPS = 5


def sample_stats(samples: list[Sample]) -> dict[str, float]:
    """Reward over episodes and length over samples (NaN without any), where their time went, and
    what agent loops counted."""
    episodes = one_per_episode(samples)
    rewards = np.array([episode.reward for episode in episodes] or [np.nan], np.float64)
    lengths = np.array([len(sample.response_ids) for sample in samples] or [np.nan], np.float64)
    is_cut = np.array(
        [sample.finish_reason == "length" for sample in samples] or [np.nan], np.float64
    )
    stats = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "response_length/mean": lengths.mean(),
        "response_length/max": lengths.max(),
        "response_length/cut_share": is_cut.mean(),
        "samples": len(samples),
    }
    floats = {name: float(value) for name, value in stats.items()}
    return floats | time_stats(samples) | agent_stats(samples) | draft_stats(samples)


def draft_stats(samples: list[Sample]) -> dict[str, float]:
    """With `rollout.speculation`: which share of the draft tokens was accepted, 0 without any;
    and how many tokens a sequence got per step of its engine. {} without `rollout.speculation`, or
    where no response was counted."""
    counts = [sample.extra["draft_tokens"] for sample in samples if "draft_tokens" in sample.extra]
    if not counts:
        return {}
    proposed, accepted, tokens = np.sum(counts, 0)
    # Of the accepted tokens of a last step some come after the end.
    steps = max(tokens - accepted, len(counts))
    return {
        "rollout/acceptance_rate": float(accepted / max(proposed, 1)),
        "rollout/acceptance_length": float(tokens / steps),
    }


def time_stats(samples: list[Sample]) -> dict[str, float]:
    """Where the time of a trajectory went, as "samples/decode_s": means over those of which that is
    known; {} where there are none."""
    known = [sample.seconds for sample in samples if sample.seconds]
    if not known:
        return {}
    return {f"samples/{part}_s": float(np.mean([s[part] for s in known])) for part in TIME_PARTS}


def agent_stats(samples: list[Sample]) -> dict[str, float]:
    """Means over episodes of what agent loops counted, as "agent/tool_calls/mean", where a missing
    count is 0; {} where all samples have one turn."""
    if not any("agent" in sample.extra for sample in samples):
        return {}
    counts_of_episodes = [agent_counts(segments) for segments in group_by_episode(samples)]
    names = dict.fromkeys(name for counts in counts_of_episodes for name in counts)
    return {
        f"agent/{name}/mean": float(
            np.mean([counts.get(name, 0.0) for counts in counts_of_episodes])
        )
        for name in names
    }


FAILED_SHARE = "agent/failed_share"


def failed_agents(samples: list[Sample]) -> tuple[int, int, str]:
    """Episodes whose agent did not end by itself and well: errors, and those that a limit of the
    run excuses.

    Returns:
        How many have failed, how many episodes there are, and the first reason.
    """
    episodes = one_per_episode(samples)
    reasons = []
    for episode in episodes:
        extra = episode.extra
        if extra.get("fault") == AGENT_ERROR:
            reasons.append(extra["error"])
        elif "agent_failure" in extra:
            reasons.append(extra["agent_failure"])
    return len(reasons), len(episodes), (reasons or [""])[0]


def failed_share(samples: list[Sample]) -> dict[str, float]:
    """The share of episodes whose agent failed; {} where all samples are of one turn and have no
    fault."""
    failed, episodes, _ = failed_agents(samples)
    if not failed and not any("agent" in sample.extra for sample in samples):
        return {}
    return {FAILED_SHARE: failed / episodes}


def first_and_last_rewards(rows: list[Row]) -> dict[str, float]:
    """The mean rewards of the first and of the last steps: five of each at most, and never the same
    step in both."""
    known = [row["reward/mean"] for row in rows if row["reward/mean"] is not None]
    rewards = [reward for reward in known if not math.isnan(reward)] or [math.nan]
    averaged_steps = max(1, min(MAX_AVERAGED_STEPS, len(rewards) // 2))
    return {
        "reward/first": np.mean(rewards[:averaged_steps]),
        "reward/last": np.mean(rewards[-averaged_steps:]),
        "reward/averaged_steps": averaged_steps,
    }


def first_and_last_kl(rows: list[Row]) -> dict[str, float]:
    """The KL to the teacher in the first and in the last step that has one; {} without a
    teacher."""
    known = [row["distill/kl"] for row in rows if row.get("distill/kl") is not None]
    return {"distill/kl/first": known[0], "distill/kl/last": known[-1]} if known else {}


def evaluation_summary(evaluations: list[dict[str, float]]) -> dict[str, Any]:
    """The held-out rewards of a run and the weight versions that were evaluated; {} without
    evaluations."""
    if not evaluations:
        return {}
    rewards = [evaluation["val/reward"] for evaluation in evaluations]
    versions = [evaluation["val/version"] for evaluation in evaluations]
    return {
        "val/first": rewards[0],
        "val/last": rewards[-1],
        "val/rewards": rewards,
        "val/versions": versions,
    }


def fault_counts(rows: list[Row]) -> dict[str, float]:
    """Samples of the whole run that were not scored, by kind of fault, and the groups dropped for
    them."""
    names = (*FAULT_METRICS, "samples/dropped_groups")
    counts = {name: sum(row.get(name, 0.0) for row in rows) for name in names}
    shares = [row.get(FAILED_SHARE, 0.0) for row in rows]
    if any(shares):
        counts[FAILED_SHARE] = float(np.mean(shares))
    return counts


def speed_summary(rows: list[Row]) -> dict[str, float | None]:
    """Medians, idle shares and rates over these steps; a median is None where no step has a value.

    Raises:
        KeyError, IndexError, ZeroDivisionError: rows without steps or without the times that every
            step has.
    """
    medians = _medians(rows)
    summary = medians_of_times(rows)
    slower_group_s = max(medians["time/generate_s"], medians["time/train_s"])
    summary["overlap_ratio"] = medians["time/step_s"] / slower_group_s
    summary |= _idle_shares(rows)
    overlapped = [row["sync/overlapped"] for row in rows if "sync/overlapped" in row]
    if overlapped:
        summary["sync/overlapped"] = np.mean(overlapped)
    summary["samples_per_s"] = _share_of_time("samples", rows, rows)
    summary["response_tokens_per_s"] = _share_of_time("tokens/response", rows, rows)
    return summary


def medians_of_times(rows: list[Row]) -> dict[str, float | None]:
    """Medians of times and speeds over these steps; None where no step has a value."""
    summary = {}
    for name, median in _medians(rows).items():
        key = f"median/{name}" if name.startswith("time/") else name
        summary[key] = median
    return summary


def per_second(name: str, rows: list[Row]) -> float:
    """The sum of a metric per second of these steps."""
    return _share_of_time(name, rows, rows)


def _medians(rows: list[Row]) -> dict[str, float | None]:
    medians: dict[str, float | None] = {}
    for name in rows[-1]:
        if not name.startswith(MEDIAN_PREFIXES) or name.endswith(TIMESTAMP_SUFFIXES):
            continue
        values = [row[name] for row in rows if row.get(name) is not None]
        medians[name] = np.median(values) if values else None
    return medians


def _share_of_time(name: str, rows: list[Row], timed_rows: list[Row]) -> float:
    """The sum of a metric per second of the steps in `timed_rows`."""
    # A step in which the last replica failed has no sync, so the metric may be missing.
    amount = sum(row.get(name) or 0.0 for row in rows)
    return amount / sum(row["time/step_s"] for row in timed_rows)


def _idle_shares(rows: list[Row]) -> dict[str, float | None]:
    """The shares of the time in which replicas and trainer do not work; None with a single step.

    The replicas idle from the end of their samples, within the step before, to the end of the next
    sync; where requests continue across a sync, while they are paused. No samples are generated
    beside the last step, so its time does not count."""
    if len(rows) < 2:
        return {"idle_share/rollout": None, "idle_share/trainer": None}
    paused_rows = [
        {"paused": row.get("time/rollout_paused_s", row.get("time/sync_s"))} for row in rows
    ]
    sync_share = _share_of_time("paused", paused_rows, rows)
    wait_share = _share_of_time("time/wait_trainer_s", rows[1:], rows[:-1])
    return {
        "idle_share/rollout": min(1.0, sync_share + wait_share),
        "idle_share/trainer": 1 - _share_of_time("time/train_s", rows, rows),
    }


def without_nan(row: Row) -> Row:
    """The row with None for each number that is not finite: JSON has no NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def reward_parts(row: Row) -> dict[str, float]:
    """The means of the parts of a step's rewards: name -> mean, from a row of metrics.jsonl."""
    parts = {}
    for key, mean in row.items():
        name = key.removeprefix("reward/").removesuffix("/mean")
        if mean is not None and key == f"reward/{name}/mean":
            parts[name] = mean
    return parts


def parts_text(parts: dict[str, float], digits: str = ".3f") -> str:
    """Parts of a reward as the text that follows it: " (right 0.750, form 0.500)"; "" where it has
    none."""
    if not parts:
        return ""
    return " (" + ", ".join(f"{name} {part:{digits}}" for name, part in parts.items()) + ")"


def sources_text(row: Row) -> str:
    """The mean rewards by source as the text that follows that of the step: " [sums 0.750, chat
    0.500]"; "" where the run has not several sources with samples in this step."""
    means = []
    for key, mean in row.items():
        name = key.removeprefix("source/").removesuffix("/reward/mean")
        if mean is not None and key == f"source/{name}/reward/mean":
            means.append(f"{name} {mean:.3f}")
    return f" [{', '.join(means)}]" if len(means) > 1 else ""


def failed_text(row: Row) -> str:
    """The share of failed agents as the text that follows the rewards; "" if none has failed."""
    share = row.get(FAILED_SHARE)
    return f"  agents failed {share:.0%}" if share else ""


def sampling_text(temperature: float) -> str:
    """How responses are chosen, in words."""
    return "greedy" if temperature == 0 else f"sampled at temperature {temperature:g}"


def evaluation_text(metrics: dict[str, float], sampling: str) -> str:
    """An evaluation in one line: each set's reward with its parts, and its pass@k for the largest
    k. `sampling`: of `sampling_text`."""
    sets = []
    for key in metrics:
        set_key = key.removesuffix("/reward")
        is_set = key.endswith("/reward") and f"{set_key}/samples" in metrics
        if is_set:  # else a part of a reward that is called "reward"
            sets.append(_set_text(metrics, set_key))
    return f"held-out reward of v{metrics['val/version']:.0f}, {sampling}: " + "; ".join(sets)


def _set_text(metrics: dict[str, float], set_key: str) -> str:
    """One held-out set: "val" or "val/NAME"."""
    name = "" if set_key == "val" else set_key.removeprefix("val/") + " "
    part_prefix = f"{set_key}/reward/"
    parts = {
        key.removeprefix(part_prefix): value
        for key, value in metrics.items()
        if key.startswith(part_prefix)
    }
    counted = "episodes" if f"{set_key}/episodes" in metrics else "samples"
    text = (
        f"{name}{metrics[f'{set_key}/reward']:.3f}{parts_text(parts)} "
        f"over {metrics[f'{set_key}/{counted}']:.0f} {counted}"
    )
    pass_keys = [key for key in metrics if key.startswith(f"{set_key}/pass@")]
    if pass_keys:
        largest = pass_keys[-1]
        text += f", {largest.rsplit('/', 1)[1]} {metrics[largest]:.3f}"
    return text
