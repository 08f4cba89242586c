"""rollout.speculation: whether it pays, and what vLLM's CPU build gets wrong. The distribution that
real engines sample from is checked in tests/e2e/test_speculation.py."""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace

import pytest
import torch

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.engines.vllm import checks, cpu_models, speculation
from one_step_off.engines.vllm.schedulers import replica_scheduler
from one_step_off.engines.vllm.speculation import (
    BLOCK_STEPS,
    KEPT_STEPS,
    SKIPPED_STEPS,
    TRIAL_STEPS,
    SpeculationTrials,
)
from tests.unit.engines.vllm.scheduler_drive import Drive, Scene, make_scheduler
from tests.unit.models.families import CONFIGS

TOKENS = 3
ROWS = 100


class Engine:
    """Makes steps at a speed that is known, as its trials say."""

    def __init__(self, seconds_with: float = 2.0, tokens_with: int = 3) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.seconds_with = seconds_with
        self.tokens_with = tokens_with  # of each row
        self.trials = SpeculationTrials(TOKENS, ROWS, self.lines.append, lambda: self.now)
        self.speculated: list[bool] = []

    def step(self, rows: int = 20, is_decoding: bool = True, goes_on: bool = True) -> None:
        speculates = self.trials.draft_tokens_by_rows[rows] > 0
        self.speculated.append(speculates)
        self.now += self.seconds_with if speculates else 1.0
        tokens = rows * (self.tokens_with if speculates else 1)
        self.trials.end_step(rows, tokens, is_decoding, goes_on)

    def steps(self, count: int, rows: int = 20) -> None:
        for _ in range(count):
            self.step(rows)


def whole_trial() -> int:
    """Steps until a trial has ended: the skipped ones after each change are not counted."""
    return TRIAL_STEPS + (TRIAL_STEPS // BLOCK_STEPS + 1) * (SKIPPED_STEPS + 1)


def test_drafts_that_pay_continue():
    engine = Engine(seconds_with=2.0, tokens_with=3)
    engine.steps(whole_trial())
    assert engine.lines == ["speculation on in batches of 16 to 31: 30 tokens/s with, 20 without"]
    engine.speculated.clear()
    engine.steps(KEPT_STEPS - 2 * whole_trial())
    assert all(engine.speculated)


def test_drafts_that_do_not_pay_end_and_are_tried_again():
    engine = Engine(seconds_with=4.0, tokens_with=3)
    engine.steps(whole_trial())
    assert engine.lines == ["speculation off in batches of 16 to 31: 15 tokens/s with, 20 without"]
    engine.speculated.clear()
    engine.steps(KEPT_STEPS - 2 * whole_trial())
    assert not any(engine.speculated)
    engine.seconds_with = 1.0  # the policy repeats itself by now
    engine.steps(3 * whole_trial())
    assert engine.lines[1:] == [
        "speculation on in batches of 16 to 31: 60 tokens/s with, 20 without"
    ]
    assert engine.speculated[-1]


def test_both_ways_alternate():
    engine = Engine()
    engine.steps(whole_trial() - SKIPPED_STEPS)
    runs = [len(list(run)) for _, run in itertools.groupby(engine.speculated)]
    assert len(runs) >= TRIAL_STEPS // BLOCK_STEPS
    assert max(runs[:-1]) <= BLOCK_STEPS + SKIPPED_STEPS + 1


def test_each_batch_size_has_its_own_choice():
    engine = Engine(seconds_with=4.0)
    engine.steps(whole_trial(), rows=70)
    engine.seconds_with = 1.0
    engine.steps(whole_trial(), rows=1)
    found = engine.trials.draft_tokens_by_rows
    assert found[1] == TOKENS
    assert found[64:] == [0] * (ROWS + 1 - 64)
    assert found[2:64] == [TOKENS] * 62, "not tried yet"


def test_what_says_nothing_of_speed_is_not_counted():
    """Prompts, the first step after a pause, the last one before the engine idles."""
    engine = Engine(seconds_with=0.5)
    for _ in range(2 * TRIAL_STEPS):
        engine.step(is_decoding=False)
    for _ in range(2 * TRIAL_STEPS):
        engine.trials.interrupt()
        engine.step()
    for _ in range(2 * TRIAL_STEPS):
        engine.step(goes_on=False)
    engine.trials.end_step(0, 0, True, True)
    assert not engine.lines and all(engine.speculated)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_scheduler_speculates_as_its_trials_say(models, monkeypatch, method):
    """Both ways are taken; drafts that come nevertheless, as of suffix trees, are dropped."""
    monkeypatch.setattr(speculation, "BLOCK_STEPS", 4)
    monkeypatch.setattr(speculation, "TRIAL_STEPS", 16)
    monkeypatch.setattr(speculation, "KEPT_STEPS", 8)
    scene = Scene(is_async=False, blocks=80, drafts=3, requests=80, tries=True, method=method)
    scheduler = make_scheduler(replica_scheduler, models(), scene)
    clock = itertools.count()
    scheduler.speculation.clock = lambda: float(next(clock))
    states = []
    own = scheduler.schedule

    def schedule():
        step = own()
        states.append((step.num_spec_tokens_to_schedule, bool(step.scheduled_spec_decode_tokens)))
        return step

    scheduler.schedule = schedule
    record = Drive(scheduler, scene).run()
    assert len(record.answers) > 60
    wanted = {tokens for tokens, _ in states}
    assert wanted == ({3} if method == "suffix" else {0, 3})
    assert {has_drafts for _, has_drafts in states[20:]} == {True, False}
    assert all(
        choice.speculates in (True, False) for choice in scheduler.speculation.choices.values()
    )


def test_a_scheduler_without_trials_speculates_always(models):
    scene = Scene(is_async=False, drafts=3)
    assert make_scheduler(replica_scheduler, models(), scene).speculation is None


# --- vLLM's CPU build --------------------------------------------------------------------------


def test_vllms_own_temperatures_are_wrong_on_cpus():
    """When this fails, vLLM sets them itself: `set_temperatures` can go."""
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    current_platform.import_kernels()
    temperatures = torch.tensor([0.25, 0.0, 0.7])
    counts = torch.tensor([2, 3, 3], dtype=torch.int32)
    right = torch.tensor([0.25, 0.25, 1.0])
    found = cpu_models.expand_batch_to_tokens(temperatures, counts, 3, 0, 1)
    assert torch.equal(found, right)
    unset = torch.full((3,), 9.0)
    _expand_kernel_impl(unset, temperatures, counts, 0, 1)
    assert not torch.equal(unset, right)


def test_the_replacement_takes_what_vllm_gives():
    from vllm.v1.sample import rejection_sampler

    source = inspect.getsource(rejection_sampler)
    assert source.count("= expand_batch_to_tokens(") == 3, "temperature, top_k, top_p"
    names = ["x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"]
    assert list(inspect.signature(cpu_models.expand_batch_to_tokens).parameters) == names
    whole = torch.tensor([5, 0, 7], dtype=torch.int32)
    found = cpu_models.expand_batch_to_tokens(whole, torch.tensor([0, 2, 3]), 3)
    assert found.dtype == torch.int32
    assert found.tolist() == [0, 0, 7]


def test_workers_get_the_replacement():
    """The module of the worker's extension is imported in every worker, and in no other process."""
    from vllm.v1.sample import rejection_sampler

    import one_step_off.engines.vllm.worker_extension  # noqa: F401

    assert rejection_sampler.expand_batch_to_tokens is cpu_models.expand_batch_to_tokens


def test_the_first_runner_has_the_limit_of_a_draft_model():
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    name = "effective_drafter_max_model_len"
    assert name in inspect.getsource(GPUModelRunner._input_fits_in_drafter)
    runner = SimpleNamespace(**{name: 64})
    cpu_models.let_drafts_reach_the_end(runner)
    assert runner.effective_drafter_max_model_len > 1e9
    other = SimpleNamespace()
    cpu_models.let_drafts_reach_the_end(other)
    assert not vars(other)


def test_layers_with_a_state_are_refused(tmp_path):
    config = CONFIGS["qwen3_5_text"]()
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.save_pretrained(tmp_path)
    cfg = Config()
    cfg.model.path = str(tmp_path)
    checks.check_policy(cfg)
    cfg.rollout.speculation = "ngram"
    with pytest.raises(ConfigError, match="rollout.speculation=ngram: .* layers with a state"):
        checks.check_policy(cfg)
