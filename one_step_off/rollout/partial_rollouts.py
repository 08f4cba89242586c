"""Which groups a step trains on where prompts may stay under way over several steps (`pipeline.partial_rollout`).

Pure bookkeeping, without an engine: prompts come in with the version that begins them, groups of samples when they are
complete, and each step takes as many groups as it trains on, those that were complete first. What is left is carried on
to the next step: a prompt leaves only by being trained on.

A prompt begun by version v is normally trained on in step v + 1, and may be carried `max_carry` steps further: it is due
in step v + 1 + max_carry. So no token is older there than 1 + max_carry. A step therefore takes late groups before others
where all would not be in time otherwise, and waits for them.
"""

from dataclasses import dataclass

import numpy as np

from one_step_off.data.samples import Prompt, PromptId, Sample


@dataclass(eq=False)
class Flight:
    """A prompt under way: the step in which it is `due` and the one for which it was begun; its samples, once all are
    there."""

    prompt: Prompt
    due: int
    step: int
    samples: list[Sample] | None = None


class Pool:
    """The prompts under way, in the order in which they were begun."""

    def __init__(self, size: int, max_carry: int) -> None:
        """`size`: groups per step. When a step ends, at most (1 + max_carry) * size prompts may be under way, or they could
        not all be in time."""
        self.size, self.max_carry = size, max_carry
        self.flights: dict[PromptId, Flight] = {}
        self.there: list[Flight] = []  # those that are complete, as they came
        self.tokens = self.samples = 0  # of all batches up to now

    @property
    def missing(self) -> int:
        """Prompts that are still being generated."""
        return len(self.flights) - len(self.there)

    def begin(self, prompts: list[Prompt], version: int, step: int) -> None:
        """These are generated from now on, for `step`, by the weights `version` and newer ones."""
        self.flights |= {p.id: Flight(p, version + 1 + self.max_carry, step) for p in prompts}

    def land(self, samples: list[Sample]) -> None:
        """All samples of one prompt are there."""
        flight = self.flights[samples[0].prompt_id]
        flight.samples = samples
        self.there.append(flight)

    def choose(self, step: int) -> list[Flight]:
        """The groups that `step` trains on, in the order in which they were begun; none as long as it must wait."""
        flights, there, chosen = self.flights.values(), self.there, set()
        if len(there) < self.size:
            return []
        for due in sorted({f.due for f in flights}):
            # The steps after this one, up to `due`, have so many places; the others who must leave by then leave now.
            places = max(0, due - step) * self.size
            more = sum(f.due <= due for f in flights) - places - sum(f.due <= due for f in chosen)
            found = [f for f in there if f.due <= due and f not in chosen][: max(0, more)]
            if len(found) < more:
                return []
            chosen.update(found)
        chosen.update([f for f in there if f not in chosen][: self.size - len(chosen)])
        return [f for f in flights if f in chosen]

    def take(self, step: int) -> list[Sample]:
        """The samples of what `choose` says, which is under way no longer. Those that were begun for an earlier step have
        `extra["carried"]`: how many steps later they are."""
        taken = self.choose(step)
        for flight in taken:
            del self.flights[flight.prompt.id]
            self.there.remove(flight)
            for s in flight.samples if flight.step < step else ():
                s.extra["carried"] = step - flight.step
        return [s for f in taken for s in f.samples]

    def figures(self, samples: list[Sample], step: int) -> dict[str, float]:
        """What carrying does to the batches, for the metrics. `carry/groups` of this step were begun for an earlier one, and
        `carry/under_way` prompts are still being generated; `carry/interrupted` is the share of samples that several
        versions made; `carry/old_tokens` the share of tokens older than one version. `carry/length_bias`: the mean length
        of what was not carried over that of all samples since the start; below 1, short answers are trained on first."""
        lengths = np.array([len(s.response_ids) for s in samples])
        fresh = np.array(["carried" not in s.extra for s in samples])
        self.tokens, self.samples = self.tokens + int(lengths.sum()), self.samples + len(samples)
        made = [s.versions[s.versions >= 0] for s in samples]
        found = {"carry/under_way": self.missing}
        found["carry/groups"] = len({s.prompt_id for s in samples if "carried" in s.extra})
        found["carry/interrupted"] = np.mean([v.size > 0 and v[0] != v[-1] for v in made])
        found["carry/old_tokens"] = np.mean(np.concatenate([*made, np.zeros(0)]) < step - 1)
        if fresh.any():
            found["carry/length_bias"] = lengths[fresh].mean() / (self.tokens / self.samples)
        return {name: float(figure) for name, figure in found.items()}
