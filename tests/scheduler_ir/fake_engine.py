"""A small engine with LMDeploy's rules of a step, to run `schedule` plug-ins on: no model, no clock, no chance."""

from dataclasses import dataclass

from sagellm.core.answers import check_schedule
from sagellm.core.hooks import Phase, RequestView, ScheduleDecision, StepResult, StepView

BLOCK = 16


@dataclass
class Request:
    number: int
    prompt: int
    max_new: int
    arrival_s: float = 0.0
    cached: int = 0  # of its prompt, found when it begins
    generated: int = 0
    computed: int = 0
    blocks: int = 0
    is_running: bool = False

    @property
    def tokens(self):
        return self.prompt + self.generated

    def row(self):
        phase = Phase.DECODE if self.is_running else Phase.PREFILL
        return RequestView(
            self.number, phase, self.tokens, self.computed, self.generated, self.blocks, self.arrival_s,
            max_new_tokens=self.max_new,
        )  # fmt: skip


class FakeEngine:
    """`steps`: what ran, (phase, {request: new tokens}). `can_cut`: else prompts are computed whole, and it is said so.
    `names_requests`: whether results do. `is_ahead`: a step is chosen while the one before it is on the device."""

    def __init__(self, plugin, *, blocks=1000, budget=512, max_batch=8, can_cut=True, names_requests=True, is_ahead=False):
        self.plugin, self.blocks, self.budget, self.max_batch = plugin, blocks, budget, max_batch
        self.can_cut, self.names_requests, self.is_ahead = can_cut, names_requests, is_ahead
        self.queue: list[Request] = []
        self.steps, self.preempted, self.ended, self.views, self.decisions = [], [], [], [], []
        self.step, self.now_s = 0, 0.0
        self._flight = None
        self._away: set[int] = set()  # who is in it

    def add(self, number, prompt=100, max_new=4, cached=0):
        self.queue.append(Request(number, prompt, max_new, self.now_s + len(self.queue) * 1e-6, cached))

    def abort(self, number):
        self.blocks += sum(each.blocks for each in self.queue if each.number == number)
        self.queue = [each for each in self.queue if each.number != number]
        self._end(number)

    def run(self, limit=500):
        """Until all have ended. Returns self."""
        for _ in range(limit):
            if not self.queue and self._flight is None:
                return self
            self.once()
        raise AssertionError(f"{[each.number for each in self.queue]} have not ended after {limit} steps: {self.steps[-5:]}")

    def once(self):
        self.now_s += 1.0
        away = self._away = set(self._flight[1]) if self._flight else set()
        here = sorted((each for each in self.queue if each.number not in away), key=lambda each: each.arrival_s)
        sent = self._send(here, len(away)) if here else None
        if self._flight:
            self._arrive(*self._flight)
        self._flight = sent
        if sent and not self.is_ahead:
            self._flight = None
            self._arrive(*sent)

    # ---- one step

    def _send(self, here, num_in_flight):
        waiting = [each for each in here if not each.is_running]
        running = [each for each in here if each.is_running]
        is_prefill = waiting and (len(waiting) >= 4 or len(running) < self.max_batch / 2)
        default = Phase.PREFILL if is_prefill or not running else Phase.DECODE
        rows = tuple(each.row() for each in waiting + running)
        view = StepView(
            step=self.step + 1, phase=default, requests=rows, free_blocks=self.blocks, token_budget=self.budget,
            max_batch_size=self.max_batch, num_in_flight=num_in_flight, now_s=self.now_s,
        )  # fmt: skip
        self.views.append(view)
        decision = check_schedule(self.plugin.schedule(view), view) or ScheduleDecision(order=[row.request_id for row in rows])
        self.decisions.append(decision)
        rank = {request: place for place, request in enumerate(decision.order)}

        def taken(group):
            return sorted((each for each in group if each.number not in decision.hold), key=lambda each: rank[each.number])

        refused = []
        if (decision.phase or default) is Phase.PREFILL:
            computed = self._prefill(taken(waiting), decision, refused)
            if computed:
                return self._sent(Phase.PREFILL, computed, refused)
        computed = self._decode(taken(running))
        return self._sent(Phase.DECODE, computed, refused) if computed else None

    def _sent(self, phase, computed, refused):
        self.step += 1
        self.steps.append((phase, dict(computed)))
        return phase, computed, refused, self.step

    def _prefill(self, group, decision, refused):
        budget = min(self.budget, decision.token_budget or self.budget)
        computed = {}
        for each in group:
            if sum(computed.values()) + each.tokens - each.computed > budget and computed:
                break
            found = each.computed or min(each.cached, each.tokens - 1)
            end = each.tokens
            chunk = decision.chunk_tokens.get(each.number)
            if chunk is not None and found + chunk < end:
                if computed:
                    refused.append((each.number, "only the first of a step is cut"))
                elif not self.can_cut:
                    refused.append((each.number, "this engine cuts no prompt"))
                else:
                    end = found + chunk
            need = -(-end // BLOCK) - each.blocks
            self._make_room(need, {each.number, *computed})
            if need > self.blocks:
                break
            self.blocks -= need
            each.blocks += need
            computed[each.number] = end - found
            each.computed = end
        return computed

    def _decode(self, group):
        computed = {}
        while group and len(computed) < self.max_batch:
            each = group.pop(0)
            need = -(-each.tokens // BLOCK) - each.blocks
            self._make_room(need, set())
            while need > self.blocks and group:
                self._preempt(group.pop())
            if need > self.blocks:
                if computed:
                    self._preempt(each)
                break
            self.blocks -= need
            each.blocks += need
            computed[each.number] = 1
            each.computed = each.tokens
        return computed

    def _make_room(self, need, spared):
        """Take the blocks of prompts that are computed in part, from the latest prompts first."""
        for each in sorted(self.queue, key=lambda each: -each.arrival_s):
            if need > self.blocks and each.blocks and not each.is_running and each.number not in spared | self._away:
                self._preempt(each)

    def _preempt(self, each):
        self.preempted.append(each.number)
        self.blocks += each.blocks
        each.blocks = each.computed = 0
        each.cached = 0
        each.is_running = False

    def _arrive(self, phase, computed, refused, step):
        by_number = {each.number: each for each in self.queue}
        names = tuple(computed.items()) if self.names_requests else ()
        result = StepResult(
            step, phase, len(computed), sum(computed.values()), self.now_s, computed=names, refused=tuple(refused)
        )
        ended = []
        for number in computed:
            each = by_number.get(number)
            if each is None:
                continue
            if each.computed >= each.tokens:
                each.is_running = True
                each.generated += 1
                if each.generated >= each.max_new:
                    ended.append(each)
        self.plugin.on_step_end(result)
        for each in ended:
            self.queue.remove(each)
            self.blocks += each.blocks
            self._end(each.number)

    def _end(self, number):
        self.ended.append(number)
        self.plugin.on_request_end(number)
