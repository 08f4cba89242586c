"""Checks a distributed checkpoint's pickles without running what they hold.

torch describes its files in one pickle, `.metadata`; Megatron's checkpoints are torch's. Before
torch reads it, it is read here, with the classes that belong there and no others. All other pickles
are inside the data files and are read by torch.load, which TORCH_FORCE_WEIGHTS_ONLY_LOAD=1 in the
environment restricts to tensors and plain values.
"""

import pickle

import torch

# Of torch.distributed.checkpoint. The planner's are in Megatron's checkpoints.
_CHECKPOINT_CLASSES = (
    "metadata.BytesStorageMetadata",
    "metadata.ChunkStorageMetadata",
    "metadata.Metadata",
    "metadata.MetadataIndex",
    "metadata.StorageMeta",
    "metadata.TensorProperties",
    "metadata.TensorStorageMetadata",
    "metadata._MEM_FORMAT_ENCODING",
    "filesystem._StorageInfo",
    "planner.SavePlan",
    "planner.TensorWriteData",
    "planner.WriteItem",
    "planner.WriteItemType",
)
_OTHERS = (
    "torch.Size",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
)


# Everything that a `.metadata` may name, as module.name.
_ALLOWED_NAMES = {
    *(f"torch.distributed.checkpoint.{name}" for name in _CHECKPOINT_CLASSES),
    *(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)),
    *_OTHERS,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if f"{module}.{name}" not in _ALLOWED_NAMES:
            raise pickle.UnpicklingError(
                f"names {module}.{name}, which is not allowed there; nothing in it was executed"
            )
        return super().find_class(module, name)


def check(path: str) -> None:
    """Read such a pickle.

    Raises:
        pickle.UnpicklingError: it names what does not belong there. A broken pickle raises
            anything.
    """
    with open(path, "rb") as file:
        _Unpickler(file).load()
