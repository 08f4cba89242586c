"""A bucket read out of a vLLM model's own parameters and written back, and the models that this is not possible for."""

from __future__ import annotations

import pytest
import torch

from one_step_off.weight_sync import delta
from one_step_off.weight_sync.bucket_plan import BucketPlan, checksum
from one_step_off.weight_sync.in_place import InPlaceBucket, InPlaceModel, NotInPlace
from one_step_off.weight_sync.weight_piece import WeightPiece


def bucket_of(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A flat bucket (uint8) that holds the tensors, and the views into it."""
    ends = (
        torch.tensor([-(-tensor.nbytes // 16) * 16 for tensor in tensors.values()])
        .cumsum(0)
        .tolist()
    )
    flat, views = torch.zeros(ends[-1], dtype=torch.uint8), {}
    for start, (name, tensor) in zip([0, *ends], tensors.items(), strict=False):
        views[name] = flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        views[name].copy_(tensor)
    return flat, views


class Fake(torch.nn.Module):
    """Two matrices in one parameter, as q and k, and a third in one of its own; `load` is how each part comes in."""

    def __init__(self, load=lambda live, name, tensor: live.copy_(tensor)) -> None:
        super().__init__()
        self.qk, self.o = (
            torch.nn.Parameter(torch.zeros(rows, 4), requires_grad=False) for rows in (8, 3)
        )
        self.load = load

    def load_weights(self, weights):
        for name, tensor in weights:
            self.load(
                {"q": self.qk.data[:4], "k": self.qk.data[4:], "o": self.o.data}[name], name, tensor
            )


def hf(dtype=torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.randn(rows, 4).to(dtype) for name, rows in (("q", 4), ("k", 4), ("o", 3))}


def record(
    model: torch.nn.Module, tensors: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, InPlaceBucket]:
    """Record where a bucket of `tensors`, which were sent, lives; its buffer is returned too."""
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    pieces = [
        WeightPiece(name, dtype, tuple(tensor.shape), 0, len(tensor))
        for name, tensor in tensors.items()
    ]
    plan, sums = BucketPlan.build([pieces], 1 << 40), checksum(bucket_of(tensors)[0])
    assert len(plan.buckets) == 1 and not plan.room
    found = InPlaceModel(plan, torch.zeros(0, dtype=torch.uint8), sums[None, None], model)
    return found.flats[0], found.live[0]


def test_reads_and_writes_where_the_model_loads():
    tensors, model = hf(), Fake()
    model.load_weights(tensors.items())
    flat, live = record(model, tensors)
    assert torch.equal(model.qk, torch.cat([tensors["q"], tensors["k"]]))
    newer = hf()
    flat.copy_(bucket_of(newer)[0])
    live.write()
    assert torch.equal(model.qk, torch.cat([newer["q"], newer["k"]])) and torch.equal(
        model.o, newer["o"]
    )
    flat.zero_()
    live.read()
    assert torch.equal(flat, bucket_of(newer)[0])


def test_views_of_what_was_sent_and_padding_are_understood():
    def load(live, name, tensor):
        for row in range(
            len(live)
        ):  # as stacked experts, and a checkpoint that stores them transposed
            live[row].copy_(tensor.t()[:, row])
        live[len(live) :].fill_(0)
        live[:, 4:].fill_(0)

    tensors, model = hf(), Fake(load)
    model.load_weights(tensors.items())
    assert torch.equal(record(model, tensors)[0], bucket_of(tensors)[0])


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (lambda live, name, tensor: live.copy_(tensor * 2), "writes something else than a part"),
        (
            lambda live, name, tensor: live.copy_(tensor.clone()),
            "writes something else than a part",
        ),
        (lambda live, name, tensor: live.add_(tensor), "writes something else than a part"),
        (
            lambda live, name, tensor: torch.mul(tensor, 1, out=live),
            "writes something else than a part",
        ),
        (
            lambda live, name, tensor: torch._foreach_copy_([live], [tensor]),
            "writes something else than a part",
        ),
        (
            lambda live, name, tensor: (live.copy_(tensor), live.fill_(7)),
            "writes something else than a part",
        ),
        (lambda live, name, tensor: live.copy_(tensor[0]), "in one piece"),
        (lambda live, name, tensor: live.t().copy_(tensor.t()), "in one piece"),
        (lambda live, name, tensor: live[:2].copy_(tensor[:2]), "only a part, or some twice"),
        (lambda live, name, tensor: None, "only a part, or some twice"),
        (lambda live, name, tensor: [live[:2].copy_(tensor[:2]) for _ in range(2)], "share memory"),
        (
            lambda live, name, tensor: [half.copy_(tensor[:2]) for half in (live[:2], live[2:4])],
            "other bytes than were sent",
        ),
        (
            lambda live, name, tensor: live.copy_(tensor.flip(0)),
            "writes something else than a part",
        ),
        (
            lambda live, name, tensor: tensor.reshape(5, 5),
            "does not load as it is: RuntimeError: shape",
        ),
    ],
)
def test_models_that_hold_something_else_are_refused_untouched(load, words):
    tensors, model = {name: tensor for name, tensor in hf().items() if name != "o"}, Fake(load)
    model.qk.copy_(torch.cat([tensors["q"], tensors["k"]]))
    before = model.qk.clone()
    with pytest.raises(NotInPlace, match=words):
        record(model, tensors)
    assert torch.equal(model.qk, before)


def test_parameters_that_were_reordered_or_narrowed_after_loading_are_refused():
    tensors, model = hf(), Fake()
    model.qk.copy_(torch.cat([tensors["k"], tensors["q"]]))
    model.o.copy_(tensors["o"])
    with pytest.raises(NotInPlace, match="other bytes than were sent"):
        record(model, tensors)
    with pytest.raises(NotInPlace, match=r"holds torch.float32 on cpu, and torch.float64"):
        record(model, hf(torch.float64))
    assert isinstance(
        record_loaded(Fake(), hf(torch.bfloat16)), InPlaceBucket
    )  # the wider one loses nothing


def record_loaded(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> InPlaceBucket:
    model.load_weights(tensors.items())
    return record(model, tensors)[1]


@pytest.fixture(scope="module")
def vllm_model(models, tmp_path_factory):
    """vllm_model(kind, tied) -> a vLLM model of its own, as it is before its weights are processed; its config; its HF
    tensors."""
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
            destroy_model_parallel()  # a model with experts needs a group more than another
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


@pytest.mark.parametrize(("kind", "tied"), [("qwen2", True), ("qwen3_moe", True), ("llama", False)])
def test_a_delta_reaches_a_real_model_as_a_load_does(vllm_model, kind, tied):
    model, _, tensors = vllm_model(kind, tied)
    before = {name: p.clone() for name, p in model.named_parameters()}
    flat, live = record(model, tensors)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    newer = {name: tensor + 0.001 * torch.randn_like(tensor) for name, tensor in tensors.items()}
    payload, _ = delta.encode(bucket_of(newer)[0], bucket_of(tensors)[0])
    flat.zero_()
    live.read()
    delta.apply(payload, flat)
    live.write()
    after = {name: p.clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data.zero_()
    model.load_weights(newer.items())
    assert all(torch.equal(p, after[name]) for name, p in model.named_parameters())
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_it_stays_right_after_a_whole_sync(vllm_model, monkeypatch):
    """vLLM's layerwise reload puts what it loaded where the parameters were, as long as nothing packs them: as on a GPU."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", lambda *args, **kwargs: None)
    model, config, tensors = vllm_model("qwen2", True)
    flat, live = record(model, tensors)
    newer = {name: torch.randn_like(tensor) for name, tensor in tensors.items()}
    with torch.device("cpu"):
        initialize_layerwise_reload(model)
        model.load_weights(newer.items())
        finalize_layerwise_reload(model, config.model_config)
    live.read()
    assert torch.equal(flat, bucket_of(newer)[0])
    assert torch.equal(record(model, newer)[0], flat)


def test_a_model_packed_for_the_cpu_is_refused(vllm_model):
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model, config, tensors = vllm_model("qwen2", True)
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    with pytest.raises(NotInPlace, match="is packed for its CPU kernel"):
        record(model, tensors)
    for module in model.modules():  # and without that sign
        vars(module).pop("cpu_linear", None)
    with pytest.raises(NotInPlace, match="does not load as it is"):
        record(model, tensors)
