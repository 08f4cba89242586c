"""What all tests of the trainers share."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """On a small machine threads that wait for each other cost more than they gain."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def one_rank_update(model_folders):
    """Gradients, metrics and weights after an update by one rank with one padded micro-batch: model
    name -> these."""
    from tests.unit.training.fsdp_helpers import OBJECTIVES, config, end, make_batch, start, whole

    results = {}
    for name, path in model_folders.items():
        worker = start(config(path, **OBJECTIVES["everything"]))
        metrics = worker.update(make_batch(path))
        results[name] = (worker.gradients, metrics, whole(worker))
        end()
    return results


@pytest.fixture(scope="session")
def judge(model_folders, tmp_path_factory):
    """A sequence classifier as it would come from the hub, its head large enough to tell sequences
    apart."""
    import transformers

    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(2)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        model_folders["tied"], num_labels=1, pad_token_id=0
    )
    with torch.no_grad():
        model.score.weight.normal_(0, 1)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(model_folders["tied"]).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def megatron_models(tmp_path_factory):
    """A folder with a tiny model of every family that the Megatron back end builds."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed (the extra)")
    from tests.unit.training.megatron_helpers import write_models

    return write_models(tmp_path_factory.mktemp("megatron"))
