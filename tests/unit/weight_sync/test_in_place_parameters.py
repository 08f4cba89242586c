"""A bucket read from a vLLM model's own parameters and written back, and models that refuse it."""

from __future__ import annotations

import pytest
import torch

from one_step_off.weight_sync import delta
from one_step_off.weight_sync.bucket_plan import BucketPlan, checksum
from one_step_off.weight_sync.in_place import InPlaceBucket, InPlaceModel, NotInPlace
from one_step_off.weight_sync.weight_piece import WeightPiece


def bucket_of(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A flat bucket (uint8) that holds the tensors, and the views into it."""
    offsets = []
    size = 0
    for tensor in tensors.values():
        offsets.append(size)
        size += -(-tensor.nbytes // 16) * 16
    flat = torch.zeros(size, dtype=torch.uint8)
    views = {}
    for offset, (name, tensor) in zip(offsets, tensors.items(), strict=True):
        part = flat[offset : offset + tensor.nbytes]
        views[name] = part.view(tensor.dtype).view(tensor.shape)
        views[name].copy_(tensor)
    return flat, views


def flat_bucket(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    flat, _ = bucket_of(tensors)
    return flat


class FakeModel(torch.nn.Module):
    """q and k in one parameter, and o in its own. `load` is how each part comes in."""

    def __init__(self, load=lambda target, tensor: target.copy_(tensor)) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.o = torch.nn.Parameter(torch.zeros(3, 4), requires_grad=False)
        self.load = load

    def load_weights(self, weights):
        targets = {"q": self.qk.data[:4], "k": self.qk.data[4:], "o": self.o.data}
        for name, tensor in weights:
            self.load(targets[name], tensor)


def random_tensors(dtype=torch.float32) -> dict[str, torch.Tensor]:
    rows = {"q": 4, "k": 4, "o": 3}
    return {name: torch.randn(count, 4).to(dtype) for name, count in rows.items()}


def map_in_place(
    model: torch.nn.Module, tensors: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, InPlaceBucket]:
    """Find one bucket of `tensors`, which were sent, in the model. Returns its buffer, too."""
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    pieces = []
    for name, tensor in tensors.items():
        pieces.append(WeightPiece(name, dtype, tuple(tensor.shape), 0, len(tensor)))
    plan = BucketPlan.build([pieces], 1 << 40)
    assert len(plan.buckets) == 1
    assert not plan.join_bytes
    no_join_buffer = torch.zeros(0, dtype=torch.uint8)
    checksums = checksum(flat_bucket(tensors))[None, None]
    in_place = InPlaceModel(plan, no_join_buffer, checksums, model)
    return in_place.buckets[0], in_place.mappings[0]


def test_reads_and_writes_where_the_model_loads():
    tensors = random_tensors()
    model = FakeModel()
    model.load_weights(tensors.items())
    flat, mapping = map_in_place(model, tensors)
    assert torch.equal(model.qk, torch.cat([tensors["q"], tensors["k"]]))

    newer = random_tensors()
    flat.copy_(flat_bucket(newer))
    mapping.write()
    assert torch.equal(model.qk, torch.cat([newer["q"], newer["k"]]))
    assert torch.equal(model.o, newer["o"])

    flat.zero_()
    mapping.read()
    assert torch.equal(flat, flat_bucket(newer))


def test_views_of_what_was_sent_and_padding_are_understood():
    def load_transposed_rows(target, tensor):
        """As stacked experts load, and a checkpoint that stores them transposed."""
        for row in range(len(target)):
            target[row].copy_(tensor.t()[:, row])
        target[len(target) :].fill_(0)
        target[:, 4:].fill_(0)

    tensors = random_tensors()
    model = FakeModel(load_transposed_rows)
    model.load_weights(tensors.items())
    flat, _ = map_in_place(model, tensors)
    assert torch.equal(flat, flat_bucket(tensors))


def load_then_fill(target, tensor):
    target.copy_(tensor)
    target.fill_(7)


def load_half_twice(target, tensor):
    target[:2].copy_(tensor[:2])
    target[:2].copy_(tensor[:2])


def load_same_half_into_both(target, tensor):
    target[:2].copy_(tensor[:2])
    target[2:4].copy_(tensor[:2])


SOMETHING_ELSE = "writes something else than a part"


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda target, tensor: target.copy_(tensor * 2), SOMETHING_ELSE),
        (lambda target, tensor: target.copy_(tensor.clone()), SOMETHING_ELSE),
        (lambda target, tensor: target.add_(tensor), SOMETHING_ELSE),
        (lambda target, tensor: torch.mul(tensor, 1, out=target), SOMETHING_ELSE),
        (lambda target, tensor: torch._foreach_copy_([target], [tensor]), SOMETHING_ELSE),
        (lambda target, tensor: target.copy_(tensor.flip(0)), SOMETHING_ELSE),
        (load_then_fill, SOMETHING_ELSE),
        (lambda target, tensor: target.copy_(tensor[0]), "in one piece"),
        (lambda target, tensor: target.t().copy_(tensor.t()), "in one piece"),
        (lambda target, tensor: target[:2].copy_(tensor[:2]), "only a part, or some twice"),
        (lambda target, tensor: None, "only a part, or some twice"),
        (load_half_twice, "share memory"),
        (load_same_half_into_both, "other bytes than were sent"),
        (lambda target, tensor: tensor.reshape(5, 5), "does not load as it is: RuntimeError"),
    ],
)
def test_models_that_hold_something_else_are_refused_and_unchanged(load, message):
    tensors = random_tensors()
    del tensors["o"]
    model = FakeModel(load)
    model.qk.copy_(torch.cat([tensors["q"], tensors["k"]]))
    before = model.qk.clone()
    with pytest.raises(NotInPlace, match=message):
        map_in_place(model, tensors)
    assert torch.equal(model.qk, before)


def test_parameters_that_were_reordered_after_loading_are_refused():
    tensors = random_tensors()
    model = FakeModel()
    model.qk.copy_(torch.cat([tensors["k"], tensors["q"]]))
    model.o.copy_(tensors["o"])
    with pytest.raises(NotInPlace, match="other bytes than were sent"):
        map_in_place(model, tensors)


def test_parameters_of_a_narrower_dtype_are_refused():
    with pytest.raises(NotInPlace, match=r"holds torch.float32 on cpu, and torch.float64"):
        map_in_place(FakeModel(), random_tensors(torch.float64))


def test_parameters_of_a_wider_dtype_lose_nothing():
    tensors = random_tensors(torch.bfloat16)
    model = FakeModel()
    model.load_weights(tensors.items())
    map_in_place(model, tensors)


@pytest.fixture(scope="module")
def vllm_model(models, tmp_path_factory):
    """vllm_model(kind, tied) -> a new vLLM model, before its weights are processed; its config; and
    its Hugging Face tensors."""
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        destroy_model_parallel,
        initialize_model_parallel,
    )
    from vllm.distributed import init_distributed_environment as init
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    store = tmp_path_factory.mktemp("store") / "store"

    def build(kind: str, tied: bool):
        path = models(kind, tied)
        args = EngineArgs(model=path, dtype="bfloat16", enforce_eager=True, max_model_len=64)
        config = args.create_engine_config()
        with set_current_vllm_config(config):
            init(1, 0, f"file://{store}", 0, "gloo")
            destroy_model_parallel()  # a model with experts needs one more group
            initialize_model_parallel()
            with set_default_torch_dtype(torch.bfloat16):
                model = initialize_model(config)
        tensors = {
            name: tensor.bfloat16()
            for name, tensor in load_file(f"{path}/model.safetensors").items()
        }
        model.load_weights(tensors.items())
        return model, config, tensors

    yield build
    cleanup_dist_env_and_memory()


def copy_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def assert_same_parameters(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize(("kind", "tied"), [("qwen2", True), ("qwen3_moe", True), ("llama", False)])
def test_a_delta_reaches_a_real_model_as_a_load_does(vllm_model, kind, tied):
    model, _, tensors = vllm_model(kind, tied)
    before = copy_parameters(model)
    flat, mapping = map_in_place(model, tensors)
    assert_same_parameters(model, before)
    newer = {name: tensor + 0.001 * torch.randn_like(tensor) for name, tensor in tensors.items()}
    payload, _ = delta.encode(flat_bucket(newer), flat_bucket(tensors))
    flat.zero_()
    mapping.read()
    delta.apply(payload, flat)
    mapping.write()
    after_delta = copy_parameters(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    model.load_weights(newer.items())
    assert_same_parameters(model, after_delta)
    assert any(not torch.equal(after_delta[name], before[name]) for name in before)


def test_the_mapping_stays_valid_after_a_full_sync(vllm_model, monkeypatch):
    """vLLM's layerwise reload puts what it loaded where the parameters were, as long as nothing
    packs them: as on a GPU."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", lambda *args, **kwargs: None)
    model, config, tensors = vllm_model("qwen2", True)
    flat, mapping = map_in_place(model, tensors)
    newer = {name: torch.randn_like(tensor) for name, tensor in tensors.items()}
    with torch.device("cpu"):
        initialize_layerwise_reload(model)
        model.load_weights(newer.items())
        finalize_layerwise_reload(model, config.model_config)
    mapping.read()
    assert torch.equal(flat, flat_bucket(newer))
    flat_again, _ = map_in_place(model, newer)
    assert torch.equal(flat_again, flat)


def test_a_model_packed_for_the_cpu_is_refused(vllm_model):
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model, config, tensors = vllm_model("qwen2", True)
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    with pytest.raises(NotInPlace, match="is packed for its CPU kernel"):
        map_in_place(model, tensors)
    for module in model.modules():  # a layer that does not show its kernel
        vars(module).pop("cpu_linear", None)
    with pytest.raises(NotInPlace, match="does not load as it is"):
        map_in_place(model, tensors)
