"""The reward model as a role of this run: one score per sequence, whatever the back end."""

import numpy as np

from one_step_off.training.model_worker import ModelWorker


class RewardModelWorker(ModelWorker):
    """The role "reward_model": the scalar head's output at the last token of a sequence, as
    classifiers do."""

    def score_sequences(self, sequences: list[np.ndarray]) -> dict[int, float]:
        """Scores of this rank's share of int sequences [L]: position -> score (collective)."""
        # The output at the last token is found where a next token's would be. So one token is
        # added; under causal attention no other one sees it.
        extended = [np.append(sequence, 0) for sequence in sequences]
        wanted = [np.array([len(sequence)]) for sequence in sequences]
        lengths = [len(sequence) for sequence in extended]
        plan = self._micro_batch_plan(lengths, self.batch_share.count)
        micro_batches = plan[self.batch_share.index]
        outputs = self._token_outputs(extended, wanted, micro_batches, temperature=1.0)
        return {i: float(output[0]) for i, output in outputs.items()}
