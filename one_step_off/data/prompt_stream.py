"""The resumable order in which prompts are drawn."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from one_step_off.config.errors import ConfigError
from one_step_off.data.samples import Prompt


class PromptStream:
    """Prompts in a fixed order, without end, from a position that can be saved.

        stream = PromptStream(prompts, batch_size=64, shuffle=True, seed=0, steps=200)
        for step in range(stream.total_steps):
            batch = stream.next_batch()

    Each epoch is one permutation of all prompts, given by (seed, epoch). Batches are always full:
    one that reaches the end of an epoch continues in the next. A prompt's id is (epoch, row), so it
    is unique in the run.

    Attributes:
        prompts: in the order of the data; `id[1]` is their row, and the epoch in `id` is replaced.
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
        self.prompts = list(prompts)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._move_to(epoch=0, offset=0)
        self.total_steps = steps or math.ceil(len(self.prompts) * epochs / batch_size)

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self.prompts)

    def next_batch(self, size: int | None = None) -> list[Prompt]:
        """The next `size` prompts (None: `batch_size`), with ids (epoch, row)."""
        if size is None:
            size = self._batch_size
        batch: list[Prompt] = []
        while len(batch) < size:
            missing = size - len(batch)
            positions = self._order[self._offset : self._offset + missing]
            for position in positions:
                prompt = self.prompts[position]
                batch.append(replace(prompt, id=(self._epoch, prompt.id[1])))
            self._offset += len(positions)
            if self._offset == len(self.prompts):
                self._move_to(self._epoch + 1, offset=0)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position, and a digest of data and order that identifies the stream.
        JSON-compatible.
        """
        return {"epoch": self._epoch, "offset": self._offset, "digest": self._digest(self._order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. The batch size may differ from the saved one; data, seed and
        order may not.

        Raises ConfigError: this stream would not continue the saved one. The position is then
        unchanged.
        """
        if state["digest"] != self._digest(self._order_of_epoch(state["epoch"])):
            same_keys = (
                "data.train_files, tokenizer, data.max_prompt_length, data.instruction, "
                "data.shuffle, trainer.seed"
            )
            raise ConfigError(
                "data: the checkpoint has other prompts or another order; "
                f"resume with the same {same_keys}"
            )
        self._move_to(state["epoch"], state["offset"])

    def _move_to(self, epoch: int, offset: int) -> None:
        self._epoch = epoch
        self._offset = offset
        self._order = self._order_of_epoch(epoch)

    def _order_of_epoch(self, epoch: int) -> np.ndarray:
        """The positions of the prompts in the order of one epoch, int64 [prompts]."""
        if not self._shuffle:
            return np.arange(len(self.prompts))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self.prompts))

    @cached_property
    def _data_digest(self) -> str:
        digest = hashlib.sha256()
        for prompt in self.prompts:
            loop = f" {prompt.agent_loop}" if prompt.agent_loop else ""
            row = f"{prompt.id[1]} {len(prompt.ids)} {prompt.ground_truth}{loop}\n"
            digest.update(row.encode() + prompt.ids.tobytes())
        return digest.hexdigest()

    def _digest(self, order: np.ndarray) -> str:
        # The order is part of it, because numpy does not promise the same permutations in all
        # versions.
        content = self._data_digest.encode() + order.astype(np.int64).tobytes()
        return hashlib.sha256(content).hexdigest()
