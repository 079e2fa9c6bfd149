"""Seven stages of skeleton-of-thought over branches of one request, and what runs them.

The plan is a request whose output is held to a grammar. Its branches share the keys and values of the question and the plan.
They are decoded in the steps of the engine beside each other and beside other requests. Speculation is the engine's: with
`suffix`, points guess from the plan and from points that were written before.

Source: skeleton-of-thought (Ning et al., 2024); stages and names of SpecSoT.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sagellm.accel.sot import schedules
from sagellm.accel.sot.delegated import write_for_master
from sagellm.accel.sot.group import Master, Sent, Worker, WorkerResult
from sagellm.accel.sot.results import (
    BranchInfo,
    Listener,
    ParallelDecodeResult,
    ParallelPrefillResult,
    ScheduleResult,
    SkeletonDecodeResult,
    SkeletonParseResult,
    SkeletonPrefillResult,
    SoTAnswer,
    TaskData,
)
from sagellm.accel.sot.skeleton import (
    DistinctPoints,
    ask_for_plan,
    heading,
    lead,
    parse_plan,
    plan_pattern,
    plan_tokens,
)
from sagellm.core.engines import TextEngine
from sagellm.core.errors import ConfigError, EngineError
from sagellm.core.running import Generation, Request, SamplingParams, Transfer, wait_for_news

__all__ = ["Listener", "SpecSoT"]

MARK = "\u2402"  # stands for the plan where a chat template is asked what follows it
PLAN_TOKENS = 256
Processor = Callable[[Any, Any], Any]


class SpecSoT:
    """Answers questions with a plan and branches, one at a time. A stage is replaced by a method of a subclass.

    Args:
        engine: one that can fork requests. Its speculative strategy is used in every stage.
        tokenizer: the model's, with a chat template.
        may_be_direct: whether the model may answer without a plan.
        params: how branches and direct answers are sampled; the plan is greedy. Limits of length are those of the calls.
        group: workers that write some of the points, with `engine` as the master's.

    Attributes:
        by_branch: requests of the answer's branches, by their ids.
        is_cancelled: after `cancel`.
    """

    def __init__(
        self, engine: TextEngine, tokenizer: Any, may_be_direct: bool = True, params: SamplingParams | None = None,
        group: Master | None = None,
    ) -> None:  # fmt: skip
        if tokenizer.chat_template is None:
            raise ConfigError("skeleton-of-thought needs a model with a chat template; this tokenizer has none.")
        self.engine, self.tokenizer = engine, tokenizer
        self._may_be_direct, self._plan_tokens = may_be_direct, plan_tokens(tokenizer)
        self._params = params or SamplingParams()
        self._group = group
        self._ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.is_cancelled = False
        self._begin()

    # ---- stages

    def skeleton_prefill(
        self, input_ids: Sequence[int], logits_processor: Processor | None, max_new_tokens: int, distributed: bool = False
    ) -> SkeletonPrefillResult:
        """Stage 1: start the plan, and wait for its first token. It is the same with workers (`distributed`)."""
        distinct = DistinctPoints(self._plan_tokens, input_ids)
        pattern = plan_pattern(self._may_be_direct)
        params = SamplingParams(pattern=pattern, processors=(distinct,), service=self._params.service)
        request = self._start(input_ids, self._limited(params, max_new_tokens, logits_processor), keep=True)
        next(iter(request), None)
        return SkeletonPrefillResult(
            input_ids=tuple(input_ids), input_len=len(input_ids), max_kv_len=len(input_ids) + max_new_tokens, request=request
        )

    def skeleton_decode(
        self, input_ids: Sequence[int], prefill_result: SkeletonPrefillResult, logits_processor: Processor | None = None,
        max_steps: int = 200,
    ) -> SkeletonDecodeResult:  # fmt: skip
        """Stage 2: wait for the whole plan, at most `max_steps` tokens of it."""
        start_s, request = time.perf_counter(), prefill_result.request
        tokens = []
        for token in request or ():
            tokens.append(token)
            if len(tokens) == max_steps:
                break
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return SkeletonDecodeResult(tuple(tokens), text, time.perf_counter() - start_s)

    def skeleton_parse(self, skeleton_text: str, task_prompt: str) -> SkeletonParseResult:
        """Stage 3: read the points of a plan."""
        return parse_plan(skeleton_text, task_prompt)

    def schedule_branches(
        self, branch_infos: Sequence[BranchInfo], use_scheduling: bool, distributed: bool, max_parallel: int
    ) -> ScheduleResult:
        """Stage 4: who writes which branches, in which order; with `use_scheduling` the longest begins first.

        Args:
            distributed: the workers of the group write some.
            max_parallel: branches at once on an engine.
        """
        devices = 1 + (len(self._group.idle()) if distributed and self._group is not None else 0)
        plan = (schedules.longest_first if use_scheduling else schedules.even)(branch_infos, devices, max_parallel)
        return ScheduleResult(plan, plan.devices[0], tuple(branch_infos))

    def parallel_prefill(
        self, prefix_ids: Sequence[int], branch_prompts: Sequence[Sequence[int]], branch_ids: Sequence[int],
        max_new_tokens: int | Sequence[int], logits_processor: Processor | None = None,
    ) -> ParallelPrefillResult:  # fmt: skip
        """Stage 5: fork the plan. Only the branches' own prompts are computed."""
        if self._plan is None:
            raise EngineError("there is no plan to fork; parallel_prefill runs within generate.")
        limits = [max_new_tokens] * len(branch_ids) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        params = [self._limited(self._params, limit, logits_processor) for limit in limits]
        branches = self.engine.fork(self._plan, branch_prompts, params, self._num_tokens)
        self._keep(branches)
        self.by_branch |= dict(zip(branch_ids, branches, strict=True))
        begins, ids = [], list(prefix_ids)
        for prompt in branch_prompts:
            begins.append(len(ids))
            ids += prompt
        return ParallelPrefillResult(
            input_ids=tuple(ids), tips_indices=len(prefix_ids) - 1, branch_begins=tuple(begins),
            branch_lengths=tuple(map(len, branch_prompts)), branch_ids=tuple(branch_ids), branches=branches,
        )  # fmt: skip

    def parallel_decode(
        self, prefill_result: ParallelPrefillResult, branch_infos: Sequence[BranchInfo], schedule_result: ScheduleResult,
        max_new_tokens: int, max_kv_len: int | None = None, use_scheduling: bool = True,
        logits_processor: Processor | None = None, listener: Listener | None = None,
    ) -> ParallelDecodeResult:  # fmt: skip
        """Stage 6: decode the branches side by side. Others begin as soon as there is room.

        Args:
            max_kv_len: tokens of all branches that run, their own prompts and predicted lengths; the common ones count once.
            use_scheduling: stage 4 has followed it; the order is that of `schedule_result`.
            listener: hears of each token as it comes.

        Raises:
            EngineError: a branch was cancelled, or the engine gave it up; the others are cancelled.
            ConfigError: one alone does not fit into `max_kv_len`.
        """
        infos, listener = {each.branch_id: each for each in branch_infos}, listener or Listener()
        prefix = list(prefill_result.input_ids[: prefill_result.tips_indices + 1])
        running = dict(zip(prefill_result.branch_ids, prefill_result.branches or (), strict=True))
        waiting = [each for each in schedule_result.my_branch_ids if each not in running]
        told = dict.fromkeys(infos, 0)
        outputs = ParallelDecodeResult()
        try:
            while running or waiting:
                most = schedule_result.schedule_plan.max_parallel
                ready = self._that_fit(waiting, running, infos, most, len(prefix), max_kv_len)
                if ready:
                    more = self.parallel_prefill(
                        prefix, [infos[each].prompt for each in ready], ready,
                        [min(max_new_tokens, infos[each].num_tokens) for each in ready], logits_processor,
                    )  # fmt: skip
                    running |= dict(zip(ready, more.branches or (), strict=True))
                    waiting = [each for each in waiting if each not in ready]
                wait_for_news([(request, told[each]) for each, request in running.items()])
                for each, request in list(running.items()):
                    has_ended = request.state != "running"  # asked first: its last tokens come before
                    if request.num_tokens > told[each]:
                        for token in request.token_ids[told[each] :]:
                            listener.token(each, token)
                            told[each] += 1
                    if has_ended:
                        del running[each]
                        found = _result(request)
                        outputs.add(each, self._without_end(found.token_ids), found.finish_reason)
                        listener.ended(each, found.finish_reason)
        finally:
            for request in running.values():
                request.cancel()
        return outputs

    def merge_results(
        self, skeleton_ids: Sequence[int], branch_outputs: dict[int, tuple[int, ...]], tasks: Sequence[TaskData],
        instruction_len: int,
    ) -> list[int]:  # fmt: skip
        """Stage 7: token ids of all points in order, each behind its number and title."""
        merged: list[int] = []
        for task in tasks:
            merged += self.tokenizer(heading(task), add_special_tokens=False).input_ids
            merged += branch_outputs[task.branch_id]
        return merged

    # ---- controllers

    def generate(
        self, question: str, enable_parallel: bool = True, max_new_tokens: int = 1024, max_parallel: int = 16,
        use_scheduling: bool = True, max_kv_len: int | None = None, logits_processor: Processor | None = None,
        listener: Listener | None = None, history: Sequence[Mapping[str, str]] = (),
    ) -> SoTAnswer:  # fmt: skip
        """Answer a question.

        Args:
            enable_parallel: with a plan whose points are written side by side; else as one text.
            max_new_tokens: of the answer as one text, and of each branch.
            max_parallel: branches at once.
            max_kv_len, listener: as in `parallel_decode`. An answer with a listener is never a worker's as a whole.
            history: messages before the question, each with `role` and `content`.

        Raises:
            EngineError: the question is too long, the answer was cancelled, or the engine gave up.
            ConfigError: the question is empty, or a branch does not fit into `max_kv_len`.
        """
        if not question.strip():
            raise ConfigError("the question is empty; give some text.")
        self._begin(history)
        if not enable_parallel:
            return self.generate_eagle(question, max_new_tokens, logits_processor, listener)
        options = dict(
            max_new_tokens=max_new_tokens, max_parallel=max_parallel, use_scheduling=use_scheduling, max_kv_len=max_kv_len
        )
        if self._group is None or logits_processor is not None or self._params.processors:  # these do not travel
            return self.run_specsot_pipeline(question, **options, logits_processor=logits_processor, listener=listener)
        with self._group.placed(may_be_worker=listener is None) as worker:
            if worker is not None and (answer := self._delegated(worker, question, options)) is not None:
                return answer
            return self.run_specsot_pipeline(question, **options, listener=listener, distributed=True)

    def generate_eagle(
        self, question: str, max_new_tokens: int, logits_processor: Processor | None = None, listener: Listener | None = None
    ) -> SoTAnswer:  # fmt: skip
        """Answer as one text, by the engine's speculative strategy, which need not be EAGLE."""
        start_s, listener = time.perf_counter(), listener or Listener()
        params = self._limited(self._params, max_new_tokens, logits_processor)
        listener.planned(())
        request = self._start(self._chat([question]), params)
        for token in request:
            listener.token(0, token)
        found = _result(request)
        listener.ended(0, found.finish_reason)
        ids = self._without_end(found.token_ids)
        stats = {"total_s": time.perf_counter() - start_s, "tokens": len(ids), "by_workers": 0, **self._counts()}
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return SoTAnswer("direct", ids, text, (), {}, stats, {0: found.finish_reason})

    def run_specsot_pipeline(
        self, question: str, max_new_tokens: int, max_parallel: int, use_scheduling: bool, max_kv_len: int | None = None,
        logits_processor: Processor | None = None, listener: Listener | None = None, distributed: bool = False,
    ) -> SoTAnswer:  # fmt: skip
        """Run the seven stages. Without a plan of use the answer is written as one text.

        Args:
            distributed: workers of the group write some of the points.
        """
        start_s, listener = time.perf_counter(), listener or Listener()
        limits = {"max_new_tokens": max_new_tokens, "max_kv_len": max_kv_len}
        sent, mode = None, "error"
        asked = self._chat(ask_for_plan(question))
        started = self.skeleton_prefill(asked, logits_processor, PLAN_TOKENS, distributed)
        self._plan = started.request
        try:
            skeleton = self.skeleton_decode(asked, started, logits_processor, PLAN_TOKENS)
            parsed = replace(self.skeleton_parse(skeleton.skeleton_text, question), instruction_len=len(asked))
            mode = parsed.mode
            if mode != "plan":
                whole = self.generate_eagle(question, max_new_tokens, logits_processor, listener)
                return replace(whole, mode=parsed.mode, error_msg=parsed.error_msg)
            listener.planned(parsed.tasks)
            prefix = [*asked, *skeleton.skeleton_ids]
            infos = self._branch_infos(question, skeleton, parsed)
            planned = self.schedule_branches(infos, use_scheduling, distributed, max_parallel)
            if distributed:
                sent = self._group.distribute_tasks_to_workers(
                    self.engine, self._plan, prefix, planned, self._params, **limits
                )
            empty = ParallelPrefillResult(input_ids=tuple(prefix), tips_indices=len(prefix) - 1)
            options = {**limits, "logits_processor": logits_processor, "listener": listener}
            found = self.parallel_decode(empty, infos, planned, use_scheduling=use_scheduling, **options)
            if sent is not None:
                left = self._collect(sent, infos, found, listener)
                more = self.parallel_decode(empty, infos, replace(planned, my_branch_ids=left), **options)
                found.branch_outputs.update(more.branch_outputs)
                found.finish_reasons.update(more.finish_reasons)
            merged = self.merge_results(skeleton.skeleton_ids, found.branch_outputs, parsed.tasks, parsed.instruction_len)
        finally:
            self._plan.cancel()
            self._plan = None
            if distributed:
                self._group.notify_workers_complete(sent, mode)
        stats = {
            "skeleton_s": skeleton.decode_time, "skeleton_tokens": len(skeleton.skeleton_ids),
            "total_s": time.perf_counter() - start_s, "by_workers": len(self._of_workers), **found.stats, **self._counts(),
        }  # fmt: skip
        text = self.tokenizer.decode(merged, skip_special_tokens=True)
        return SoTAnswer("plan", tuple(merged), text, parsed.tasks, found.branch_outputs, stats, found.finish_reasons)

    def worker_pipeline(self, worker: Worker) -> None:
        """Write points for a master until it has gone. Several answers at once."""
        write_for_master(self, worker)

    def cancel(self) -> None:
        """End the answer that is being written, and take no other one. From any thread."""
        self.is_cancelled = True
        for each in list(self._requests):
            each.cancel()

    # ---- for a worker

    def anew(self, may_be_direct: bool, params: SamplingParams) -> "SpecSoT":
        """Return one more, for an answer at the same time."""
        other = copy.copy(self)
        other._may_be_direct, other._params = may_be_direct, params
        other._begin()
        return other

    def take_plan(self, prefix_ids: Sequence[int], transfer: Transfer) -> ParallelPrefillResult:
        """Take the question and the plan over from another engine; without their keys and values they are computed here."""
        self._plan = self._start(prefix_ids, SamplingParams(1, ignore_eos=True, transfer=transfer), keep=True)
        _result(self._plan)
        self._num_tokens = 0
        return ParallelPrefillResult(input_ids=tuple(prefix_ids), tips_indices=len(prefix_ids) - 1)

    # ---- parts

    def _delegated(self, worker: Any, question: str, options: dict[str, Any]) -> SoTAnswer | None:
        """Let a worker write the whole answer. None: it did not."""
        start_s, found = time.perf_counter(), list[WorkerResult]()
        sent = self._group.delegate(
            worker, self._params, question=question, history=self._history, may_be_direct=self._may_be_direct, options=options
        )
        try:
            self._group.collect_worker_results(sent, found.append, self._check)
        finally:
            self._group.notify_workers_complete(sent, "plan")
        if not found:
            return None
        answer = found[0].whole
        stats = {"by_workers": len(answer.finish_reasons), "total_s": time.perf_counter() - start_s}
        return replace(answer, stats=answer.stats | stats)

    def _collect(
        self, sent: Sent, infos: Sequence[BranchInfo], found: ParallelDecodeResult, listener: Listener
    ) -> tuple[int, ...]:
        """Add the points of workers to `found`; return those that are to be written here."""
        by_id = {info.branch_id: info for info in infos}

        def take(result: WorkerResult) -> None:
            for token in result.token_ids:
                listener.token(result.branch_id, token)
            found.add(result.branch_id, self._without_end(result.token_ids), result.finish_reason)
            self._of_workers.append((result, by_id[result.branch_id]))
            listener.ended(result.branch_id, result.finish_reason)

        return tuple(sorted(self._group.collect_worker_results(sent, take, self._check)))

    def _begin(self, history: Sequence[Mapping[str, str]] = ()) -> None:
        self._plan: Request | None = None  # the request that branches are forked from
        self._num_tokens: int | None = None  # new ones of it that branches have; None: all
        self._history = [dict(each) for each in history]  # messages before the question
        self._requests: list[Request] = []  # of the answer that is being written
        self.by_branch: dict[int, Request] = {}
        self._of_workers: list[tuple[WorkerResult, BranchInfo]] = []  # points of it that workers have written

    def _start(self, prompt: Sequence[int], params: SamplingParams, keep: bool = False) -> Request:
        self._check()
        request = self.engine.start(prompt, params, keep)
        self._keep([request])
        return request

    def _keep(self, requests: Sequence[Request]) -> None:
        self._requests += requests
        if self.is_cancelled:  # in the meantime
            self.cancel()
        self._check()

    def _check(self) -> None:
        if self.is_cancelled:
            raise EngineError("the answer was cancelled.")

    def _limited(self, params: SamplingParams, max_new_tokens: int, logits_processor: Processor | None) -> SamplingParams:
        more = () if logits_processor is None else (logits_processor,)
        return replace(
            params, max_new_tokens=max_new_tokens, stop_token_ids=(*params.stop_token_ids, *self._ends),
            processors=(*params.processors, *more),
        )  # fmt: skip

    def _that_fit(
        self, waiting: Sequence[int], running: dict[int, Request], infos: dict[int, BranchInfo], max_parallel: int,
        num_common: int, max_kv_len: int | None,
    ) -> list[int]:  # fmt: skip
        """The next branches that may begin, in their order."""
        sizes = {each: len(info.prompt) + info.num_tokens for each, info in infos.items()}
        used, ready = num_common + sum(sizes[each] for each in running), list[int]()
        for each in waiting[: max(0, max_parallel - len(running))]:
            alone = num_common + sizes[each]
            if alone > (max_kv_len or alone):
                raise ConfigError(
                    f"branch {each} needs {alone} tokens with the {num_common} that are common; max_kv_len is {max_kv_len}. "
                    "Raise it, or ask for shorter points."
                )
            if max_kv_len is not None and used + sizes[each] > max_kv_len:
                break
            used += sizes[each]
            ready.append(each)
        return ready

    def _branch_infos(self, question: str, skeleton: SkeletonDecodeResult, parsed: SkeletonParseResult) -> list[BranchInfo]:
        end = self.tokenizer.eos_token or ""
        infos = []
        for task, wanted in zip(parsed.tasks, parsed.clean_branches, strict=True):
            text = self._chat_text([*ask_for_plan(question), MARK, wanted]).split(MARK, 1)[1]
            if skeleton.skeleton_ids and skeleton.skeleton_ids[-1] in self._ends:
                text = text.removeprefix(end)  # the plan ends with this token
            ids = self.tokenizer(text + lead(task), add_special_tokens=False).input_ids
            infos.append(BranchInfo(task.branch_id, task.title, tuple(ids), task.num_tokens))
        return infos

    def _chat(self, turns: Sequence[str]) -> list[int]:
        return self.tokenizer(self._chat_text(turns), add_special_tokens=False).input_ids

    def _chat_text(self, turns: Sequence[str]) -> str:
        """The text of a conversation whose turns are the user's and the assistant's in turn."""
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
        return self.tokenizer.apply_chat_template(self._history + messages, add_generation_prompt=True, tokenize=False)

    def _without_end(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens[:-1] if tokens and tokens[-1] in self._ends else tokens)

    def _counts(self) -> dict[str, int]:
        """Tokens of the answer's requests; those that branches have of the plan's request count once. And their guesses."""
        rows = [(len(info.prompt), len(result.token_ids), *result.guesses) for result, info in self._of_workers]
        for each in self._requests:
            common = 0 if each.parent is None else len(each.parent.prompt) + each.parent.num_tokens
            rows.append((len(each.prompt) - common, each.num_tokens, *(each.guesses[:2] or (0, 0))))
        names = ("prompt_tokens", "completion_tokens", "drafted", "accepted")
        return {name: sum(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def _result(request: Request) -> Generation:
    """Wait for a request's last token. Raises EngineError: it was cancelled, or the engine gave it up."""
    found = request.result()
    if found.finish_reason == "cancelled":
        raise EngineError(f"request {request.request_id} was cancelled.")
    return found
