"""Fixtures of the tests that start training workers in their own process."""

import pytest


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory):
    """Folders of a tied and an untied model with a tokenizer, as they would come from the hub: name
    -> path."""
    from tests.unit.training.fsdp_helpers import MODELS, write_model

    root = tmp_path_factory.mktemp("models")
    folders = {}
    for name, make_config in MODELS.items():
        write_model(make_config(), root / name)
        folders[name] = str(root / name)
    return folders


@pytest.fixture
def start_single():
    """start_single(cfg, ...) starts a one-rank worker in place of the one before; the last one is
    ended."""
    from tests.unit.training.fsdp_helpers import end, start

    def start_alone(cfg, **kwargs):
        end()
        return start(cfg, **kwargs)

    yield start_alone
    end()
