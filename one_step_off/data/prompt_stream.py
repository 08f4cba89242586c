"""The resumable order in which prompts are drawn."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from one_step_off.config.errors import ConfigError
from one_step_off.data.difficulty import Visit
from one_step_off.data.samples import Batch, Prompt, Sample


class PromptOrder:
    """The prompts of one source, epoch after epoch, from a position that can be saved.

    Each epoch is one permutation of all prompts, given by (seed, epoch, index).

    Attributes:
        prompts: in the order of the data; `id[1]` is their row, and the epoch in `id` is replaced.
        epoch, offset: the position: `offset` prompts of the epoch are behind it.
    """

    def __init__(self, prompts: Sequence[Prompt], shuffle: bool, seed: int, index: int = 0) -> None:
        """`index`: of the source."""
        self.prompts = list(prompts)
        self._shuffle = shuffle
        self._seed = seed
        self._index = index
        self._move_to(epoch=0, offset=0)

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self.prompts)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts, with ids (epoch, row)."""
        taken: list[Prompt] = []
        while len(taken) < count:
            missing = count - len(taken)
            positions = self._order[self.offset : self.offset + missing]
            taken += [self._drawn(position) for position in positions]
            self.offset += len(positions)
            self._end_epoch_if_due()
        return taken

    def take_due(self, due: np.ndarray) -> Prompt:
        """The next prompt that is due; the others are passed over.

        Args:
            due: int [prompts], the first epoch in which each prompt may be drawn.
        """
        while True:
            while self.offset < len(self.prompts):
                position = self._order[self.offset]
                self.offset += 1
                if due[position] <= self.epoch:
                    prompt = self._drawn(position)
                    self._end_epoch_if_due()
                    return prompt
            # An epoch in which no prompt is due is passed over without a look at its order.
            self._move_to(max(self.epoch + 1, int(due.min())), offset=0)

    def _drawn(self, position: int) -> Prompt:
        prompt = self.prompts[position]
        return replace(prompt, id=(self.epoch, prompt.id[1]))

    def _end_epoch_if_due(self) -> None:
        if self.offset == len(self.prompts):
            self._move_to(self.epoch + 1, offset=0)

    def state_dict(self) -> dict[str, Any]:
        """The position, and a digest of data and order that identifies the stream.
        JSON-compatible.
        """
        return {"epoch": self.epoch, "offset": self.offset, "digest": self._digest(self._order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. The batch size may differ from the saved one; data, seed and
        order may not.

        Raises ConfigError: this stream would not continue the saved one. The position is then
        unchanged.
        """
        self.check_state(state)
        self._move_to(state["epoch"], state["offset"])

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises ConfigError: this stream would not continue the saved one."""
        if state.get("digest") != self._digest(self._order_of_epoch(state.get("epoch", 0))):
            same_keys = (
                "data.train_files, tokenizer, data.max_prompt_length, data.instruction, "
                "data.shuffle, trainer.seed"
            )
            raise ConfigError(
                "data: the checkpoint has other prompts or another order; "
                f"resume with the same {same_keys}"
            )

    def _move_to(self, epoch: int, offset: int) -> None:
        self.epoch = epoch
        self.offset = offset
        self._order = self._order_of_epoch(epoch)

    def _order_of_epoch(self, epoch: int) -> np.ndarray:
        """The positions of the prompts in the order of one epoch, int64 [prompts]."""
        if not self._shuffle:
            return np.arange(len(self.prompts))
        # The first source has the order of a run with one source.
        index = [self._index] if self._index else []
        return np.random.default_rng([self._seed, epoch, *index]).permutation(len(self.prompts))

    @cached_property
    def _data_digest(self) -> str:
        digest = hashlib.sha256()
        for prompt in self.prompts:
            loop = f" {prompt.agent_loop}" if prompt.agent_loop else ""
            row = f"{prompt.id[1]} {len(prompt.ids)} {prompt.ground_truth}{loop}\n"
            digest.update(row.encode() + prompt.ids.tobytes() + b"".join(prompt.images))
        return digest.hexdigest()

    def _digest(self, order: np.ndarray) -> str:
        # The order is part of it, because numpy does not promise the same permutations in all
        # versions.
        content = self._data_digest.encode() + order.astype(np.int64).tobytes()
        return hashlib.sha256(content).hexdigest()


class PromptStream(PromptOrder):
    """Prompts in a fixed order, without end, from a position that can be saved.

        stream = PromptStream(prompts, batch_size=64, shuffle=True, seed=0, steps=200)
        for step in range(stream.total_steps):
            batch = stream.next_batch()

    Batches are always full: one that reaches the end of an epoch continues in the next. A prompt's
    id is (epoch, row), so it is unique in the run.

    Attributes:
        total_steps: `steps`; where that is 0, the fewest steps that see every prompt `epochs`
            times. The stream itself does not end there, and the last step may take some prompts of
            the next epoch to be full.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        batch_size: int,
        shuffle: bool,
        seed: int,
        steps: int = 0,
        epochs: int = 0,
    ) -> None:
        super().__init__(prompts, shuffle, seed)
        self._batch_size = batch_size
        self.total_steps = steps or math.ceil(len(self.prompts) * epochs / batch_size)

    def next_batch(self, size: int | None = None) -> list[Prompt]:
        """The next `size` prompts (None: `batch_size`), with ids (epoch, row)."""
        return self.take(self._batch_size if size is None else size)

    def begin_step(self, step: int, known_until: int) -> None:
        """See `MixedStream.begin_step`. This order does not depend on results."""

    def visits(self, samples: list[Sample]) -> list[Visit]:
        """See `MixedStream.visits`: none are kept."""
        return []

    def record(self, batch: Batch) -> dict[str, float]:
        """See `MixedStream.record`: nothing is kept, and there are no metrics."""
        return {}

    def position_without(self, before: dict[str, Any]) -> dict[str, Any]:
        """See `MixedStream.position_without`."""
        return before
