"""Read the model and the rows of a supervised run and check them, before any GPU is taken."""

import contextlib
from typing import Any

from one_step_off.config.lengths import longest_row
from one_step_off.config.placement import resolved_device
from one_step_off.config.schema import Config
from one_step_off.data.supervised_data import load_supervised_data
from one_step_off.models.model_checks import check_models
from one_step_off.models.weight_checks import check_weights
from one_step_off.runtime.prepare import (
    PrintLine,
    RunInputs,
    ShowProgress,
    check_own_optimizers,
    check_profile_step,
    find_models,
    find_resume_point,
)


def prepare_supervised(
    cfg: Config,
    print_line: PrintLine,
    show_progress: ShowProgress = lambda task, done: None,
) -> RunInputs:
    """As `prepare`, for a run of supervised steps.

    Args:
        cfg: of `supervised_config`, validated.
        print_line, show_progress: see `prepare`.

    Raises:
        ConfigError: bad input, in one line that says how to fix it.
    """
    named_models = find_models(cfg, show_progress)
    tokenizer = check_models(cfg, longest_row(cfg))
    check_weights(cfg)
    data = load_supervised_data(cfg, tokenizer, _stop_ids(cfg, tokenizer))
    for line in data.lines():
        print_line(line)
    check_profile_step(cfg, data.stream.total_steps)
    check_own_optimizers(cfg)
    resume_point = find_resume_point(cfg, data, print_line)
    return RunInputs(
        cfg,
        resolved_device(cfg),
        data,
        [],
        tokenizer,
        named_models,
        [],
        resume_point,
        is_supervised=True,
    )


def _stop_ids(cfg: Config, tokenizer: Any) -> frozenset[int]:
    """The tokens at which an engine with this model ends a response: those of its generation
    config, and the tokenizer's."""
    from transformers import GenerationConfig

    stop_ids: list[int | None] = [tokenizer.eos_token_id]
    with contextlib.suppress(OSError):  # the model may have no generation config
        eos: Any = GenerationConfig.from_pretrained(cfg.model.path).eos_token_id
        stop_ids += eos if isinstance(eos, list) else [eos]
    return frozenset(stop_id for stop_id in stop_ids if stop_id is not None)
