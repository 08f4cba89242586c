"""The trainer's calls for the arm "vllm". Ray calls these functions on every trainer rank.

vLLM is imported inside the functions: importing it takes seconds and memory, and the driver and the
other arms must not pay for it.
"""

from __future__ import annotations

from typing import Any


def import_vllm(worker: Any) -> None:
    """Import vLLM in the trainer process before anything is measured."""
    from benchmarks.weight_sync import vllm_transfer  # noqa: F401


def open_vllm(worker: Any, host: str, port: int, receivers: int, replicas: list[Any]) -> None:
    """Create vLLM's own trainer engine, which connects to the engines of the replicas
    (collective).
    """
    from benchmarks.weight_sync.vllm_transfer import trainer_engine

    worker.bench_vllm = trainer_engine(worker, host, port, receivers, replicas)


def send_vllm(worker: Any) -> dict[str, float]:
    """One whole update by vLLM's own sender (collective), which drives the replicas.

    Returns:
        Seconds: "gather" and "send".
    """
    from benchmarks.weight_sync.vllm_transfer import send

    return send(worker)
