"""Devices: what torch sees, whether they compute, and whether they reach one another."""

import torch

from one_step_off.tools.gpu_check.check import CheckFailed, Context, Figures

SIZE = 512
"""Rows of the matrices that are multiplied."""

TOLERANCE = 1e-2
"""Of the product's entries, which have a standard deviation of 1; GPUs may multiply in TF32."""


def devices(context: Context) -> Figures:
    """Multiply matrices on each device, and compare with the CPU."""
    figures: Figures = {"torch": torch.__version__}
    if not context.is_cuda:
        _check_product(torch.device("cpu"))
        return figures | {"threads": torch.get_num_threads()}
    if not torch.cuda.is_available():
        raise CheckFailed(f"torch {torch.__version__} sees no GPU; nvidia-smi sees {context.gpus}")
    count = torch.cuda.device_count()
    figures |= {
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "gpus": count,
    }
    for index in range(count):
        _check_product(torch.device("cuda", index))
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        figures[f"gpu {index}"] = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
    for index in range(count):
        reached = [
            str(peer)
            for peer in range(count)
            if peer != index and torch.cuda.can_device_access_peer(index, peer)
        ]
        figures[f"peers of gpu {index}"] = " ".join(reached) or "none"
    return figures


def _check_product(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(SIZE, SIZE, generator=generator)
    right = torch.randn(SIZE, SIZE, generator=generator) / SIZE**0.5
    product = (left.to(device) @ right.to(device)).cpu()
    error = (product - (left.double() @ right.double()).float()).abs().max().item()
    if not error <= TOLERANCE:
        raise CheckFailed(f"{device}: a matrix product is wrong by {error:.3g}")
