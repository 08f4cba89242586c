"""Reading a distributed checkpoint's pickles without running what they hold.

torch describes its files in one pickle, `.metadata`; Megatron's checkpoints are torch's. Before torch reads it, it is
read here, with the classes that belong there and no others. Whatever else is pickled is inside of the data files, and
torch.load reads it, which TORCH_FORCE_WEIGHTS_ONLY_LOAD=1 in the environment keeps to tensors and plain values.
"""

import pickle

import torch

# The planner's are Megatron's.
_PARTS = """metadata.BytesStorageMetadata metadata.ChunkStorageMetadata metadata.Metadata metadata.MetadataIndex
    metadata.StorageMeta metadata.TensorProperties metadata.TensorStorageMetadata metadata._MEM_FORMAT_ENCODING
    filesystem._StorageInfo planner.SavePlan planner.TensorWriteData planner.WriteItem planner.WriteItemType"""
_ALLOWED = {f"torch.distributed.checkpoint.{name}" for name in _PARTS.split()}
_ALLOWED |= {str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_ALLOWED |= {
    "torch.Size",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if f"{module}.{name}" not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"names {module}.{name}, which has no place there; nothing of it was run"
            )
        return super().find_class(module, name)


def check(path: str) -> None:
    """Read such a pickle. Raises pickle.UnpicklingError: it names what has no place there; if it is broken, anything."""
    with open(path, "rb") as f:
        _Unpickler(f).load()
