"""Real checkpoints of a one-rank FSDP worker."""

import shutil

import pytest


@pytest.fixture(scope="session")
def finished_run(model_folders, tmp_path_factory):
    """The config of a run folder with checkpoints of steps 5 and 10."""
    from tests.unit.checkpoint.checkpoint_helpers import save_worker
    from tests.unit.training.fsdp_helpers import config, end, make_batch, start

    folder = tmp_path_factory.mktemp("finished_run")
    cfg = config(model_folders["tied"], trainer__output_dir=str(folder))
    worker = start(cfg)
    batch = make_batch(model_folders["tied"])
    for step in (5, 10):
        worker.update(batch)
        save_worker(worker, cfg, step, batch.samples)
    end()
    return cfg


@pytest.fixture
def run(finished_run, model_folders, tmp_path):
    """A copy of it: config, and the folder of step 10."""
    from tests.unit.training.fsdp_helpers import config

    folder = tmp_path / "run"
    shutil.copytree(finished_run.trainer.output_dir, folder)
    cfg = config(model_folders["tied"], trainer__output_dir=str(folder))
    return cfg, folder / "checkpoints" / "step_000010"
