"""A contestant of `benchmarks.cpu_engine` in the environment of its peer: vLLM for CPUs, or llama.cpp on a GGUF file."""

import os
import time
from typing import Any

from benchmarks.peers.worker import answer_requests


class VllmWorker:
    """vLLM with its engine in this process. `model`: folder of a Hugging Face model."""

    def __init__(self, model: str, threads: int, context: int, batch: int) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": str(threads)}
        import vllm

        self._version, self._sampling, self._number = vllm.__version__, vllm.SamplingParams, 0
        options = {"dtype": "bfloat16", "max_model_len": context, "max_num_seqs": batch, "enable_prefix_caching": False}
        self._engine = vllm.LLM(model=model, **options).llm_engine

    def about(self) -> dict[str, Any]:
        return {"version": self._version}

    def times(self, prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        """Seconds from the call to each new token, by prompt."""
        wanted = self._sampling(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        start_s, times = time.perf_counter(), {}
        for prompt in prompts:
            self._number += 1
            times[str(self._number)] = []
            self._engine.add_request(str(self._number), {"prompt_token_ids": prompt}, wanted)
        while self._engine.has_unfinished_requests():
            outputs, now_s = self._engine.step(), time.perf_counter() - start_s
            for output in outputs:
                found = times[output.request_id.split("-")[0]]
                found += [now_s] * (len(output.outputs[0].token_ids) - len(found))
        return list(times.values())


class LlamaWorker:
    """llama.cpp, one request at a time. `model`: a GGUF file, computed in the weights that it holds."""

    def __init__(self, model: str, threads: int, context: int, batch: int) -> None:
        import llama_cpp

        self._version = llama_cpp.__version__
        self._model = llama_cpp.Llama(model, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)

    def about(self) -> dict[str, Any]:
        return {"version": self._version}

    def times(self, prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        """Seconds from the call to each new token, by prompt."""
        (prompt,) = prompts
        start_s, found = time.perf_counter(), []
        self._model.reset()
        for _ in self._model.generate(prompt, temp=0.0, top_k=1):
            found.append(time.perf_counter() - start_s)
            if len(found) == new_tokens:
                return [found]
        raise RuntimeError("llama.cpp stopped generating")


def build(engine: str, model: str, threads: int, context: int, batch: int) -> Any:
    return (VllmWorker if engine == "vllm" else LlamaWorker)(model, threads, context, batch)


if __name__ == "__main__":
    answer_requests(build)
