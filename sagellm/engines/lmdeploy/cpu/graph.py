"""The model runner of the CPU device: eager, so a warm-up of one size stands for all."""

from lmdeploy.pytorch.backends.graph_runner import GraphRunner


class EagerRunner(GraphRunner):
    """Runs the model as it is. There is no graph to capture, hence one warm-up batch instead of one a power of two."""

    def get_capture_batch_sizes(self) -> list[int]:
        return [1]
