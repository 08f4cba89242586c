"""The canary's tolerance in bfloat16: measured with real models, whose engine half computes in
float32 (so it rounds otherwise than the trainer's half), and held against wrong weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from one_step_off.cluster.errors import SyncError
from one_step_off.weight_sync.canary import LARGEST, MEAN, Canary

VOCABULARY = 384
SEQUENCES, TOKENS = 4, 48
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
MODELS = {"dense": ("qwen2", {}), "experts": ("qwen3_moe", EXPERTS)}
STEP = 0.01
"""Of an optimizer step: relative to the weights. Far larger than a real one."""

DISTURBED_SHARE = 0.01


def nowhere(line: str) -> None:
    """A log that nobody reads."""


@pytest.fixture(params=sorted(MODELS))
def engine(request: pytest.FixtureRequest) -> torch.nn.Module:
    """A model in float32 whose weights are bf16 numbers: what the engine holds."""
    torch.manual_seed(0)
    kind, more = MODELS[request.param]
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        initializer_range=0.1,
        **more,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    round_to_bfloat16(model)
    return model


def round_to_bfloat16(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()


def trainer_of(engine: torch.nn.Module) -> torch.nn.Module:
    """The same weights, computed in bfloat16."""
    return copy.deepcopy(engine).bfloat16()


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    # Even tokens only: the odd rows of the embedding are read by no sequence.
    return [
        2 * torch.randint(VOCABULARY // 2, (TOKENS,), generator=generator) for _ in range(SEQUENCES)
    ]


@torch.no_grad()
def score(model: torch.nn.Module) -> list[np.ndarray]:
    scores = []
    for ids in sequences():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        scores.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy())
    return scores


def check(canary: Canary, trainer: torch.nn.Module, engine: torch.nn.Module) -> dict[str, float]:
    return canary.check(score(trainer), {0: score(engine)}, "a sync", nowhere)


def calibrated(engine: torch.nn.Module) -> Canary:
    canary = Canary(None, "bfloat16")
    check(canary, trainer_of(engine), engine)
    assert not canary.calibrates
    return canary


def disturb_elements(model: torch.nn.Module) -> None:
    """A share of every matrix's elements becomes noise of the matrix's size."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            chosen = torch.rand(parameter.shape) < DISTURBED_SHARE
            noise = torch.randn(int(chosen.sum())) * parameter.data.std()
            parameter.data[chosen] = noise


def zero_rows(model: torch.nn.Module) -> None:
    """A share of every matrix's rows did not arrive."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data[torch.rand(parameter.shape[0]) < DISTURBED_SHARE] = 0


def swap_layers(model: torch.nn.Module) -> None:
    """Two layers were exchanged."""
    layers = model.base_model.layers
    layers[1], layers[2] = layers[2], layers[1]


def take_a_step(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data *= 1 + STEP * torch.randn(parameter.shape)
    round_to_bfloat16(model)


def test_later_versions_pass_with_what_was_measured(engine: torch.nn.Module) -> None:
    canary = calibrated(engine)
    assert MEAN.floor <= canary.tolerance.mean <= MEAN.bound
    assert LARGEST.floor <= canary.tolerance.largest <= LARGEST.bound
    for _ in range(5):
        take_a_step(engine)
        metrics = check(canary, trainer_of(engine), engine)
        assert metrics["canary/logprob_diff_mean"] > 1e-4, "bf16 rounds"
        assert metrics["canary/tolerance"] == canary.tolerance.largest


@pytest.mark.parametrize("fault", [disturb_elements, zero_rows, swap_layers])
def test_wrong_weights_are_detected_after_the_measurement(
    engine: torch.nn.Module, fault: Callable[[torch.nn.Module], None]
) -> None:
    canary = calibrated(engine)
    trainer = trainer_of(engine)
    fault(engine)
    with pytest.raises(SyncError, match="measured in the first sync"):
        check(canary, trainer, engine)


@pytest.mark.parametrize("fault", [disturb_elements, zero_rows, swap_layers])
def test_wrong_weights_in_the_first_sync_are_not_taken_for_noise(
    engine: torch.nn.Module, fault: Callable[[torch.nn.Module], None]
) -> None:
    trainer = trainer_of(engine)
    fault(engine)
    with pytest.raises(SyncError, match="the bound of a first sync"):
        check(Canary(None, "bfloat16"), trainer, engine)


def test_an_engine_that_stays_a_version_behind_is_detected(engine: torch.nn.Module) -> None:
    """By five steps of 1 % here. Real steps are far smaller: there the checksums detect it."""
    canary = calibrated(engine)
    ahead = copy.deepcopy(engine)
    for _ in range(5):
        take_a_step(ahead)
    with pytest.raises(SyncError):
        check(canary, trainer_of(ahead), engine)


def test_what_it_cannot_see(engine: torch.nn.Module) -> None:
    """Weights that none of its tokens reads. Checksums and the check of names cover those."""
    canary = calibrated(engine)
    trainer = trainer_of(engine)
    engine.get_input_embeddings().weight.data[1::2] = 0
    check(canary, trainer, engine)


# ---- quantized engines ---------------------------------------------------------------------------


def quantize(model: torch.nn.Module) -> torch.nn.Module:
    """The model with FP8 weights in its layers, one scale for each row."""
    quantized = copy.deepcopy(model)
    for name, parameter in quantized.named_parameters():
        if parameter.ndim > 1 and ".layers." in name:
            scale = (parameter.data.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-6)
            fp8 = (parameter.data / scale).to(torch.float8_e4m3fn)
            parameter.data = fp8.float() * scale
    return quantized


@pytest.mark.parametrize("fault", [disturb_elements, swap_layers])
def test_wrong_weights_in_a_quantized_engine_are_detected(
    engine: torch.nn.Module, fault: Callable[[torch.nn.Module], None]
) -> None:
    """In the first sync, and after five versions that pass."""
    canary = Canary(None, "bfloat16", is_quantized=True)
    metrics = check(canary, trainer_of(engine), quantize(engine))
    assert metrics["canary/logprob_diff_mean"] > MEAN.bound, "or it is no other than bfloat16's"
    for _ in range(5):
        take_a_step(engine)
        check(canary, trainer_of(engine), quantize(engine))
    trainer = trainer_of(engine)
    fault(engine)
    for checking in (canary, Canary(None, "bfloat16", is_quantized=True)):
        with pytest.raises(SyncError):
            check(checking, trainer, quantize(engine))


def test_a_quantized_cache_is_measured_in_float32_too() -> None:
    canary = Canary(None, "float32", is_quantized=True)
    lines: list[str] = []
    canary.check(ZEROS, {0: differing(0.3, 0.03)}, "sync 0", lines.append)
    assert canary.tolerance.largest == pytest.approx(1.5)
    assert canary.tolerance.mean == pytest.approx(0.075)
    assert "float32, quantized in the engine" in lines[0]
    with pytest.raises(SyncError):
        Canary(None, "float32", is_quantized=True).check(
            ZEROS, {0: differing(2.0, 0.6)}, "sync 0", nowhere
        )


# ---- the rule ------------------------------------------------------------------------------------


def differing(largest: float, mean: float, tokens: int = 100) -> list[np.ndarray]:
    """Scores that differ from zeros by this."""
    scores = np.full(tokens, (mean * tokens - largest) / (tokens - 1), np.float64)
    scores[0] = largest
    return [scores]


ZEROS = [np.zeros(100)]


@pytest.mark.parametrize(
    ("largest", "mean", "tolerance", "mean_tolerance"),
    [
        (0.06, 0.001, 0.5, 0.02),  # the floors
        (0.3, 0.03, 1.5, 0.09),  # multiples
        (2.5, 0.05, 4.0, 0.1),  # the bounds: a mixture of experts
    ],
)
def test_the_tolerance_follows_from_the_first_sync(
    largest: float, mean: float, tolerance: float, mean_tolerance: float
) -> None:
    canary = Canary(None, "bfloat16")
    lines: list[str] = []
    metrics = canary.check(ZEROS, {0: ZEROS, 3: differing(largest, mean)}, "sync 0", lines.append)
    assert metrics["canary/tolerance"] == pytest.approx(tolerance)
    assert canary.tolerance.mean == pytest.approx(mean_tolerance)
    (line,) = lines
    assert f"allowed from here on: {tolerance:.3g} and {mean_tolerance:.3g}" in line
    canary.check(ZEROS, {0: differing(tolerance * 0.99, mean)}, "sync 1", lines.append)
    with pytest.raises(SyncError, match=r"replica 0 .*\(max\), more than the tolerance measured"):
        canary.check(ZEROS, {0: differing(tolerance * 1.01, mean)}, "sync 2", lines.append)
    with pytest.raises(SyncError, match=r"\(mean\)"):
        canary.check(ZEROS, {0: differing(0.11, mean_tolerance * 1.01)}, "sync 2", lines.append)
    assert len(lines) == 1


@pytest.mark.parametrize(("largest", "mean"), [(4.1, 0.05), (0.5, 0.11), (float("nan"), 0.0)])
def test_a_first_sync_beyond_the_bound_ends_the_attempt(largest: float, mean: float) -> None:
    canary = Canary(None, "bfloat16")
    with pytest.raises(SyncError, match="sync 0: rollout replica 0"):
        canary.check(ZEROS, {0: differing(largest, mean)}, "sync 0", nowhere)
    assert canary.calibrates, "nothing was measured"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_given_tolerance_is_not_measured(dtype: str) -> None:
    canary = Canary(0.02, dtype)
    lines: list[str] = []
    metrics = canary.check(ZEROS, {0: differing(0.019, 0.0015)}, "sync 0", lines.append)
    assert metrics["canary/tolerance"] == 0.02 and not lines
    with pytest.raises(SyncError, match=r"weight_sync.canary_tolerance = 0.02"):
        canary.check(ZEROS, {0: differing(0.021, 0.0015)}, "sync 1", nowhere)


def test_float32_keeps_its_tolerance() -> None:
    canary = Canary(None, "float32")
    metrics = canary.check(ZEROS, {0: differing(9e-4, 5e-5)}, "sync 0", nowhere)
    assert metrics["canary/tolerance"] == 1e-3
    with pytest.raises(SyncError, match="canary_tolerance = 0.001"):
        canary.check(ZEROS, {0: differing(1.1e-3, 5e-5)}, "sync 1", nowhere)
