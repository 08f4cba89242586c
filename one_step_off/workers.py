"""The contract between a training back end and the rest of the program, and with it that of the weight stream.

A back end knows nothing of vLLM, the receiver knows nothing of FSDP or Megatron. Between them stand
`WeightPiece`s: rows of tensors, named as the Hugging Face checkpoint names them.

A back end has a class per role, as `fsdp_workers.py` does, where the methods are described:

    every role     free_address, setup
    actor, critic  update, save_state, load_state, and the number `version`
    actor          score, weight_plan, weight_tensors, save_hf
    actor, ref     log_prob, log_prob_and_squares
    critic         values
    reward_model   score_sequences
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightPiece:
    """The rows [start, stop) along dimension 0 of one HF-named tensor, owned by one trainer rank.

    `shape` is the shape of the whole tensor, `dtype` the torch dtype's name ("bfloat16") on the wire.
    A 0-dimensional tensor counts as one row. Pieces of all ranks together cover every tensor once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
