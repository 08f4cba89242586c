"""As `engine`, but vLLM uses its parameters as they were loaded, as on a GPU.

On CPUs vLLM packs the parameters of linear layers for every kernel except torch's own. It uses
torch's where no other kernel is available, so this module hides the others. Then a worker can tell
what it keeps, and receives that alone.
"""

from vllm import _custom_ops
from vllm.model_executor.layers import utils

from benchmarks.weight_sync import engine

_custom_ops._supports_onednn = False
utils.check_cpu_sgl_kernel = lambda *args: False


class BenchmarkExtension(engine.BenchmarkExtension):
    """What `collective_rpc` calls in each vLLM worker."""
