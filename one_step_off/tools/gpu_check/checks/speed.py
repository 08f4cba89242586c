"""Forward and backward passes of random models: tokens per second, FLOP/s, and the share of the
device's peak (MFU). A plain model, without sharding and without an optimizer.
"""

import math
import time
from typing import Any

import torch

from one_step_off.data.token_work import pass_work
from one_step_off.monitoring.flops import peak_flops, shape_of
from one_step_off.tools.gpu_check.check import CheckFailed, Context, Figures, Skip
from one_step_off.tools.gpu_check.checkpoints import QWEN_0_5B, QWEN_7B, TINY, Shape

TOKENS = {"cpu": 256, "cuda": 4096}
"""Of each sequence."""

SEQUENCES = (4, 2, 1)
"""The first number that fits into memory."""

WARMUPS = 1
REPEATS = 3
CHUNK = 2048
"""Tokens of which logits exist at a time."""

BYTES_PER_PARAMETER = 4
"""Parameters and gradients in bf16."""

SPARE_BYTES = 12 << 30
"""Activations and logits beside them."""


def small(context: Context) -> Figures:
    """A 0.5B model; the tiny one on CPUs."""
    return _measure(context, QWEN_0_5B if context.is_cuda else TINY, recompute=False)


def large(context: Context) -> Figures:
    """A 7B model, with activations computed again; the tiny one on CPUs."""
    return _measure(context, QWEN_7B if context.is_cuda else TINY, recompute=True)


def _measure(context: Context, shape: Shape, recompute: bool) -> Figures:
    from transformers import AutoConfig

    settings = {"vocab_size": 384, "hidden_size": 128, "intermediate_size": 256} | shape
    settings.setdefault("num_hidden_layers", 2)
    config = AutoConfig.for_model("qwen2", **settings)
    device = torch.device(context.device, 0) if context.is_cuda else torch.device("cpu")
    model, parameters = _random_model(config, device)
    if context.is_cuda:
        _compile_layers(model)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    flops_shape = shape_of(model)
    width = TOKENS[context.device]
    for sequences in SEQUENCES:
        ids = torch.randint(config.vocab_size, (sequences, width), device=device)
        try:
            seconds = _fastest_pass(model, ids, device)
        except torch.OutOfMemoryError:
            continue
        work = pass_work([width] * sequences, ids.numel() - 1)
        flops = flops_shape.train_flops(work) if flops_shape else 0.0
        figures = _figures(device, parameters, seconds, ids.numel(), flops)
        size = {"model": "random weights" if context.is_cuda else "tiny, as on every CPU"}
        return size | figures | {"sequences": f"{sequences} of {width} tokens"}
    raise Skip(f"not even one sequence of {width} tokens fits into this GPU's memory")


def _compile_layers(model: Any) -> None:
    """As the trainer does on GPUs."""
    from one_step_off.training.compilation import Compiler

    compiler = Compiler("decoder layers", dynamic=True)
    for layer in model.model.layers:
        layer.forward = compiler.compiled(layer.forward)


def _fastest_pass(model: Any, ids: torch.Tensor, device: torch.device) -> float:
    """Seconds of a forward and a backward pass. What is computed again counts as time, not as
    FLOPs."""
    for _ in range(WARMUPS):
        _pass(model, ids)
    seconds = min(_timed_pass(model, ids, device) for _ in range(REPEATS))
    loss = _pass(model, ids).item()
    _require_computed(loss, [parameter.grad for parameter in model.parameters()])
    return seconds


def _require_computed(loss: float, gradients: list[torch.Tensor | None]) -> None:
    """Raises CheckFailed: the loss is not finite, or the gradient is not, or is 0."""
    if not math.isfinite(loss):
        raise CheckFailed(f"the loss is {loss}")
    norms = [0.0 if one is None else one.float().norm().item() for one in gradients]
    total = math.hypot(*norms)
    if not (math.isfinite(total) and total > 0):
        raise CheckFailed(f"the gradient's norm is {total}")


def _random_model(config: Any, device: torch.device) -> tuple[Any, int]:
    """The model with random weights, made on the device; and its parameters, tied ones once."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    _require_memory(device, parameters)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    return model, parameters


def _require_memory(device: torch.device, parameters: int) -> None:
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    needed = BYTES_PER_PARAMETER * parameters + SPARE_BYTES
    if free < needed:
        raise Skip(f"needs {needed / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} are free")


def _timed_pass(model: Any, ids: torch.Tensor, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    _pass(model, ids)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _pass(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """One forward and backward pass of the trainer's kind: logits in chunks, computed again; on a
    GPU compiled. Returns the loss."""
    from one_step_off.training.token_outputs import in_chunks, log_probs_and_entropy

    model.zero_grad()
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state

    def project(rows: torch.Tensor, tokens: torch.Tensor) -> Any:
        return log_probs_and_entropy(model.lm_head(rows), tokens, 1.0, "none", ids.is_cuda)

    positions = torch.arange(ids.numel() - 1, device=ids.device)
    log_probs, _ = in_chunks(project, hidden, positions, ids.flatten()[1:], CHUNK)
    loss = -log_probs.mean()
    loss.backward()
    return loss.detach()


def _figures(
    device: torch.device, parameters: int, seconds: float, tokens: int, flops: float
) -> Figures:
    figures: Figures = {
        "parameters, M": parameters / 1e6,
        "tokens/s": tokens / seconds,
        "TFLOP/s": flops / seconds / 1e12,
    }
    if device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device))
        figures["MFU, %"] = 100 * flops / seconds / peak if peak else "peak of this GPU not known"
        figures["peak memory, GiB"] = torch.cuda.max_memory_allocated(device) / 2**30
    return figures
