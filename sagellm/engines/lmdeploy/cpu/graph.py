"""The model runner of the CPU device: eager, over a model that its operators have prepared once."""

from lmdeploy.pytorch.backends.graph_runner import GraphRunner
from torch import nn

from sagellm.engines.lmdeploy.cpu.operators import prepare


class EagerRunner(GraphRunner):
    """Runs the model as it is. There is no graph to capture, hence one warm-up batch instead of one a power of two."""

    def __init__(self, model: nn.Module, *args, **kwargs) -> None:
        prepare(model)
        super().__init__(model, *args, **kwargs)

    def get_capture_batch_sizes(self) -> list[int]:
        return [1]
