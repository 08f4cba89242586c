"""Trajectories for the tests of the advantage estimators."""

import numpy as np
from hypothesis import settings

from one_step_off.algorithms import advantages as adv
from one_step_off.algorithms.advantages import Trajectories, estimate_advantages
from one_step_off.config.loading import KEYS

NAMES = list(adv.ADVANTAGE_ESTIMATORS)
CORRECTIONS = [
    name for name in KEYS["algorithm.rollout_correction"].metadata["choices"] if name != "none"
]
GROUPED = [n for n in NAMES if adv.ADVANTAGE_ESTIMATORS[n].grouped]
quick = settings(max_examples=25, deadline=None)


def outcome(rewards, groups, lengths=None, **more):
    lengths = lengths or [1] * len(rewards)
    return Trajectories(
        np.array(rewards, dtype=float), groups, [np.ones(n, dtype=bool) for n in lengths], **more
    )


def first(t, name, options=None, **kwargs):
    """One value per trajectory: its first trained token's."""
    result = estimate_advantages(name, t, options, **kwargs)[0]
    return [float(a[m][0]) for a, m in zip(result, t.masks, strict=True)]


def some(seed, n=12, turns=True):
    """Trajectories of three groups with everything that any estimator may need, and masks with
    gaps.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, n)
    masks = [rng.random(r) < 0.7 if turns else np.ones(r, dtype=bool) for r in lengths]
    for m in masks[:3]:
        m[:] = False  # filtered: no trained token at all
    per_token = lambda low, high: [rng.uniform(low, high, r).astype(np.float32) for r in lengths]  # noqa: E731
    return Trajectories(
        rewards=rng.integers(0, 4, n).astype(float),
        groups=[int(g) for g in rng.integers(0, 3, n)],
        masks=masks,
        token_rewards=per_token(-0.2, 0.2),
        values=per_token(-1, 1),
        parts={"right": rng.integers(0, 2, n).astype(float), "form": rng.normal(size=n)},
        baselines=rng.normal(size=n),
        log_probs=per_token(-3, -0.1),
        prob_squares=per_token(0.3, 0.9),
    )


def vars_of(t):
    return {f: getattr(t, f) for f in Trajectories.__dataclass_fields__}


def take(t, order):
    """The same trajectories in another order."""

    def pick(x):
        if x is None:
            return None
        if isinstance(x, dict):
            return {k: v[order] for k, v in x.items()}
        return x[order] if isinstance(x, np.ndarray) else [x[i] for i in order]

    return Trajectories(**{f: pick(getattr(t, f)) for f in Trajectories.__dataclass_fields__})
