"""Seven stages of skeleton-of-thought over branches of one request, and what runs them.

The plan is a request whose output is held to a grammar. Its branches share the keys and values of the question and the plan.
They are decoded in the steps of the engine beside each other and beside other requests. Speculation is the engine's: with
`suffix`, points guess from the plan and from points that were written before.

Source: skeleton-of-thought (Ning et al., 2024); stages and names of SpecSoT.
"""

import contextlib
import copy
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sagellm.accel.sot import schedules
from sagellm.accel.sot.group import Answered, Complete, Master, Question, Sent, Tasks, Worker, WorkerResult, info_of
from sagellm.accel.sot.results import (
    BranchInfo,
    ParallelDecodeResult,
    ParallelPrefillResult,
    SchedulePlan,
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
from sagellm.core.errors import ConfigError, EngineError, PeerError
from sagellm.core.running import Request, SamplingParams, Transfer, wait_for_news

__all__ = ["Listener", "SpecSoT"]

MARK = "\u2402"  # stands for the plan where a chat template is asked what follows it
PLAN_TOKENS = 256
Processor = Callable[[Any, Any], Any]


class Listener:
    """Hears of an answer while it is written, on the thread of its caller. A subclass takes what it needs.

    An answer as one text has one branch, 0, and no points.
    """

    def planned(self, tasks: Sequence[TaskData]) -> None:
        """The plan is read; empty for an answer as one text. Comes once, before any token."""

    def token(self, branch_id: int, token: int) -> None:
        """A branch has one more token."""

    def ended(self, branch_id: int, reason: str) -> None:
        """A branch has its last token. `reason`: stop or length."""


class SpecSoT:
    """Answers questions with a plan and branches, one at a time. A stage is replaced by a method of a subclass.

    Args:
        engine: one that can fork requests. Its speculative strategy is used in every stage.
        tokenizer: the model's, with a chat template.
        may_be_direct: whether the model may answer without a plan.
        params: how branches and direct answers are sampled; the plan is greedy. Limits of length are those of the calls.
        group: workers that write some of the points, with `engine` as the master's.
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
        self._plan: Request | None = None  # the request that branches are forked from
        self._num_tokens: int | None = None  # new ones of it that branches have; None: all
        self._history: list[dict[str, str]] = []  # messages before the question
        self._requests: list[Request] = []  # of the answer that is being written
        self._by_branch: dict[int, Request] = {}
        self._of_workers: list[tuple[WorkerResult, BranchInfo]] = []  # points of it that workers have written

    # ---- stages

    def skeleton_prefill(
        self, input_ids: Sequence[int], logits_processor: Processor | None, max_new_tokens: int, distributed: bool = False
    ) -> SkeletonPrefillResult:
        """Stage 1: start the plan, and wait for its first token. It is the same with workers (`distributed`)."""
        params = SamplingParams(
            max_new_tokens, stop_token_ids=self._ends, pattern=plan_pattern(self._may_be_direct),
            processors=(DistinctPoints(self._plan_tokens, input_ids), *_processors(logits_processor)),
        )  # fmt: skip
        request = self._started(self.engine.start(input_ids, params, keep=True))
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
        devices = 1 + (self._group.num_idle if distributed and self._group is not None else 0)
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
        params = [
            replace(
                self._params, max_new_tokens=limit, stop_token_ids=(*self._params.stop_token_ids, *self._ends),
                processors=(*self._params.processors, *_processors(logits_processor)),
            )
            for limit in limits
        ]  # fmt: skip
        branches = self.engine.fork(self._plan, branch_prompts, params, self._num_tokens)
        self._requests += branches
        self._by_branch |= dict(zip(branch_ids, branches, strict=True))
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
            EngineError: the engine gave a branch up; the others are cancelled.
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
                        tokens = request.token_ids
                        for token in tokens[told[each] :]:
                            listener.token(each, token)
                        told[each] = len(tokens)
                    if has_ended:
                        del running[each]
                        found = request.result()
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
            max_kv_len, listener: as in `parallel_decode`.
            history: messages before the question, each with `role` and `content`.

        Raises:
            EngineError: the question is too long, or the engine gave up.
            ConfigError: the question is empty, or a branch does not fit into `max_kv_len`.
        """
        if not question.strip():
            raise ConfigError("the question is empty; give some text.")
        self._history = [dict(each) for each in history]
        self._requests, self._by_branch, self._of_workers = [], {}, []
        if not enable_parallel:
            return self.generate_eagle(question, max_new_tokens, logits_processor, listener)
        options = (question, max_new_tokens, max_parallel, use_scheduling, max_kv_len)
        if self._group is None or logits_processor is not None or self._params.processors:  # these do not travel
            return self.run_specsot_pipeline(*options, logits_processor, listener)
        with self._group.placed() as worker:
            if worker is not None and (answer := self._delegated(worker, *options, listener or Listener())) is not None:
                return answer
            return self.run_specsot_pipeline(*options, None, listener, distributed=True)

    def generate_eagle(
        self, question: str, max_new_tokens: int, logits_processor: Processor | None = None, listener: Listener | None = None
    ) -> SoTAnswer:  # fmt: skip
        """Answer as one text, by the engine's speculative strategy, which need not be EAGLE."""
        start_s, listener = time.perf_counter(), listener or Listener()
        params = replace(
            self._params, max_new_tokens=max_new_tokens, stop_token_ids=(*self._params.stop_token_ids, *self._ends),
            processors=(*self._params.processors, *_processors(logits_processor)),
        )  # fmt: skip
        listener.planned(())
        request = self._started(self.engine.start(self._chat([question]), params))
        for token in request:
            listener.token(0, token)
        found = request.result()
        listener.ended(0, found.finish_reason)
        ids = self._without_end(found.token_ids)
        stats = {"total_s": time.perf_counter() - start_s, "tokens": len(ids), **self._counts()}
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
                    self._plan, prefix, planned, max_new_tokens, max_kv_len, self._params
                )
            empty = ParallelPrefillResult(input_ids=tuple(prefix), tips_indices=len(prefix) - 1)
            found = self.parallel_decode(
                empty, infos, planned, max_new_tokens, max_kv_len, use_scheduling, logits_processor, listener
            )
            if sent is not None:
                again = self._collect(sent, infos, found, listener)
                planned = replace(planned, my_branch_ids=tuple(sorted(again)))
                more = self.parallel_decode(empty, infos, planned, max_new_tokens, max_kv_len, listener=listener)
                for each in again:
                    found.add(each, more.branch_outputs[each], more.finish_reasons[each])
            merged = self.merge_results(skeleton.skeleton_ids, found.branch_outputs, parsed.tasks, parsed.instruction_len)
        finally:
            if self._plan is not None:
                self._plan.cancel()
            self._plan = None
            if distributed:
                self._group.notify_workers_complete(sent, mode)
        stats = {
            "skeleton_s": skeleton.decode_time, "skeleton_tokens": len(skeleton.skeleton_ids),
            "total_s": time.perf_counter() - start_s, **found.stats, **self._counts(),
        }  # fmt: skip
        text = self.tokenizer.decode(merged, skip_special_tokens=True)
        return SoTAnswer("plan", tuple(merged), text, parsed.tasks, found.branch_outputs, stats, found.finish_reasons)

    def worker_pipeline(self, worker: Worker) -> None:
        """Write points for a master until it has gone. Several answers at once."""
        running: dict[int, tuple[threading.Thread, SpecSoT]] = {}
        while (message := worker.receive_tasks_from_master()) is not None:
            if isinstance(message, Complete):
                _, at_work = running.pop(message.answer, (None, None))
                if at_work is not None:
                    at_work._give_up()
                continue
            sot = copy.copy(self)
            sot._params = replace(self._params, **message.sampling)
            sot._requests, sot._by_branch, sot._of_workers = [], {}, []
            thread = threading.Thread(target=sot._work, args=(worker, message), name=f"sagellm-sot-{message.answer}")
            running[message.answer] = thread, sot
            thread.start()
        for thread, sot in running.values():
            sot._give_up()
            thread.join()

    # ---- parts

    def _work(self, worker: Worker, tasks: Tasks | Question) -> None:
        """Write an answer, or points of one, for a master."""
        try:
            if isinstance(tasks, Question):
                self._write_answer(worker, tasks)
            else:
                self._write_points(worker, tasks)
        except PeerError:
            pass  # the master has gone
        except Exception as error:  # whatever it is, the master must not wait for it
            with contextlib.suppress(PeerError):
                worker.send_results_to_master(WorkerResult(answer=tasks.answer, error=f"{type(error).__name__}: {error}"))

    def _write_answer(self, worker: Worker, asked: Question) -> None:
        self._may_be_direct = asked.may_be_direct
        tokens: defaultdict[int, list[int]] = defaultdict(list)

        class Kept(Listener):
            def token(self, branch_id: int, token: int) -> None:
                tokens[branch_id].append(token)

        try:
            found = self.generate(asked.question, history=asked.history, listener=Kept(), **asked.options)
        finally:
            self._give_up()
        for each, reason in found.finish_reasons.items():
            worker.send_results_to_master(
                WorkerResult(answer=asked.answer, branch_id=each, token_ids=tuple(tokens[each]), finish_reason=reason)
            )
        tasks = tuple((each.branch_id, each.title, each.num_tokens) for each in found.tasks)
        worker.send_results_to_master(
            Answered(answer=asked.answer, mode=found.mode, error_msg=found.error_msg, tasks=tasks, stats=found.stats)
        )

    def _delegated(
        self, worker: Any, question: str, max_new_tokens: int, max_parallel: int, use_scheduling: bool, max_kv_len: int | None,
        listener: Listener,
    ) -> SoTAnswer | None:  # fmt: skip
        """Let a worker write the whole answer; `listener` hears of it at the end. None: the worker did not."""
        start_s = time.perf_counter()
        options = dict(
            max_new_tokens=max_new_tokens, max_parallel=max_parallel, use_scheduling=use_scheduling, max_kv_len=max_kv_len
        )
        found = self._group.delegate(worker, question, self._history, self._may_be_direct, options, self._params)
        if found is None:
            return None
        answer, points = found
        tasks, written = tuple(TaskData(*each) for each in answer.tasks), ParallelDecodeResult()
        listener.planned(tasks)
        for each in points:
            for token in each.token_ids:
                listener.token(each.branch_id, token)
            listener.ended(each.branch_id, each.finish_reason)
            written.add(each.branch_id, self._without_end(each.token_ids), each.finish_reason)
        ids = tuple(self.merge_results((), written.branch_outputs, tasks, 0)) if tasks else written.branch_outputs[0]
        stats = answer.stats | {"by_workers": len(points), "total_s": time.perf_counter() - start_s}
        return SoTAnswer(
            answer.mode, ids, self.tokenizer.decode(ids, skip_special_tokens=True), tasks,
            written.branch_outputs if tasks else {}, stats, written.finish_reasons, answer.error_msg,
        )  # fmt: skip

    def _write_points(self, worker: Worker, tasks: Tasks) -> None:
        send, sot = worker.send_results_to_master, self

        class Sending(Listener):
            def ended(self, branch_id: int, reason: str) -> None:
                request = sot._by_branch[branch_id]
                guesses = request.guesses[:2] or (0, 0)
                send(
                    WorkerResult(
                        answer=tasks.answer, branch_id=branch_id, token_ids=request.token_ids, finish_reason=reason,
                        drafted=guesses[0], accepted=guesses[1],
                    )
                )

        transfer = Transfer(tasks.source, tasks.transfer_id)
        self._plan = self.engine.start(tasks.prefix, SamplingParams(1, ignore_eos=True, transfer=transfer), keep=True)
        try:
            self._plan.result()
            self._num_tokens = 0
            infos = [info_of(each) for each in tasks.branches]
            ids = tuple(info.branch_id for info in infos)
            planned = ScheduleResult(SchedulePlan((ids,), tasks.max_parallel), ids, tuple(infos))
            empty = ParallelPrefillResult(input_ids=tasks.prefix, tips_indices=len(tasks.prefix) - 1)
            self.parallel_decode(empty, infos, planned, tasks.max_new_tokens, tasks.max_kv_len, listener=Sending())
        finally:
            self._give_up()

    def _give_up(self) -> None:
        """End the requests of an answer, from any thread."""
        for each in (self._plan, *self._requests):
            if each is not None:
                each.cancel()

    def _collect(
        self, sent: Sent, infos: Sequence[BranchInfo], found: ParallelDecodeResult, listener: Listener
    ) -> set[int]:
        """Add the points of workers to `found`; return those that are to be written here."""
        by_id = {info.branch_id: info for info in infos}

        def take(result: WorkerResult) -> None:
            for token in result.token_ids:
                listener.token(result.branch_id, token)
            found.add(result.branch_id, self._without_end(result.token_ids), result.finish_reason)
            self._of_workers.append((result, by_id[result.branch_id]))
            listener.ended(result.branch_id, result.finish_reason)

        return self._group.collect_worker_results(sent, take)

    def _that_fit(
        self, waiting: Sequence[int], running: dict[int, Request], infos: dict[int, BranchInfo], max_parallel: int,
        num_common: int, max_kv_len: int | None,
    ) -> list[int]:  # fmt: skip
        """The next branches that may begin, in their order."""
        sizes = {each: len(info.prompt) + info.num_tokens for each, info in infos.items()}
        used, ready = num_common + sum(sizes[each] for each in running), list[int]()
        for each in waiting:
            alone = num_common + sizes[each]
            if max_kv_len is not None and alone > max_kv_len:
                raise ConfigError(
                    f"branch {each} needs {alone} tokens with the {num_common} that are common; max_kv_len is {max_kv_len}. "
                    "Raise it, or ask for shorter points."
                )
            if len(running) + len(ready) == max_parallel or (max_kv_len is not None and used + sizes[each] > max_kv_len):
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

    def _started(self, request: Request) -> Request:
        self._requests.append(request)
        return request

    def _counts(self) -> dict[str, int]:
        """Tokens of the answer's requests; those that branches have of the plan's request count once. And their guesses."""
        prompts = [
            len(each.prompt) - (0 if each.parent is None else len(each.parent.prompt) + each.parent.num_tokens)
            for each in self._requests
        ]
        guesses = [each.guesses[:2] for each in self._requests if each.guesses]
        guesses += [(result.drafted, result.accepted) for result, _ in self._of_workers]
        prompts += [len(info.prompt) for _, info in self._of_workers]
        tokens = [each.num_tokens for each in self._requests] + [len(result.token_ids) for result, _ in self._of_workers]
        return {
            "prompt_tokens": sum(prompts), "completion_tokens": sum(tokens), "by_workers": len(self._of_workers),
            "drafted": sum(drafted for drafted, _ in guesses), "accepted": sum(accepted for _, accepted in guesses),
        }  # fmt: skip


def _processors(logits_processor: Processor | None) -> tuple[Processor, ...]:
    return () if logits_processor is None else (logits_processor,)
