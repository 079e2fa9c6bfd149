"""The plug-ins of one process: owners of decisions, listeners, and counters."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import takewhile
from typing import Any

import numpy as np

from sagellm.core.config import HookConfig
from sagellm.core.errors import PluginError, PolicyError
from sagellm.core.events import Recorder, open_recorder
from sagellm.core.guard import PluginFault, PluginGuard, Switched
from sagellm.core.hooks import COMM_HOOKS, DECISIONS, NOTICES, Plugin, Tier, overrides
from sagellm.core.registry import check_owners, load_plugin

logger = logging.getLogger("sagellm")

CLOSE_S = 5.0  # for the `close` of a plug-in; after a fault also for its hook to return
START_REFUSED = "start-refused"  # in `run_dir`: what keeps an engine process from starting
ENGINE_PROCESS = "mp_engine_proc"  # LMDeploy's name of a server's engine process
ENGINE_ENDED = "engine-ended"  # in `run_dir`: why an engine process ended by itself


class Nonsense(Exception):
    """An invalid answer. The message says what was got and what is allowed."""


class PluginHost:
    """Calls the hooks of the configured plug-ins. `faults` lists the faults that switched one off."""

    def __init__(self, config: HookConfig) -> None:
        self.config = config
        self.recorder: Recorder = open_recorder(config.record)
        self.faults: list[PluginFault] = []
        self._closed = False
        self._closers: dict[str, threading.Thread] = {}  # of plug-ins that were switched off
        self.plugins = [(spec.name, load_plugin(spec)) for spec in config.plugins]
        check_owners(self.plugins)
        self.guards = {name: PluginGuard(name, config.time_limit_s, self._on_fault) for name, _ in self.plugins}
        self._owner = {hook: self._users(hook)[0] for hook in DECISIONS if self._users(hook)}
        self._listeners = {hook: self._users(hook) for hook in (*NOTICES, *COMM_HOOKS)}

    def attach(self, make_handle: Callable[[PluginGuard], Any]) -> None:
        """Give every plug-in its handle. A plug-in that fails here is switched off.

        Raises:
            PluginError: a required plug-in fails. All are closed then, and a file in `run_dir` has the reason.
        """
        required = {spec.name for spec in self.config.plugins if spec.required}
        for name, plugin in self.plugins:
            try:
                self.guards[name].call("attach", plugin.attach, make_handle(self.guards[name]))
            except Switched:
                if name in required:
                    self._refuse_start(name)

    def _refuse_start(self, name: str) -> None:
        fault = self.guards[name].fault
        why = f"plug-in {name} {fault.kind}: {fault.detail.splitlines()[-1]}" if fault else f"plug-in {name} is off"
        self.close(CLOSE_S)
        self.refuse(why)
        raise PluginError(why)

    def refuse(self, why: str) -> None:
        """Write for the server why this engine does not start."""
        if self.config.run_dir is not None:
            with suppress(OSError):
                (self.config.run_dir / START_REFUSED).write_text(why)

    def decides(self, hook: str) -> bool:
        """Return whether a healthy plug-in owns this decision."""
        owner = self._owner.get(hook)
        return owner is not None and self.guards[owner[0]].fault is None

    def decide(
        self, hook: str, view: Any, check: Callable[[Any], Any], until_s: float = math.inf
    ) -> tuple[str, Any] | None:
        """Ask the owner of a decision.

        Args:
            check: turns the raw answer into plain values, and raises `Nonsense` or any other error if it is invalid. It runs on
                the plug-in's thread, since reading an answer may run the plug-in's code.

        Returns:
            (plug-in name, checked answer). None if there is no owner, it was switched off, or it is busy beyond `until_s`.
        """
        decided = self.decide_each(hook, (view,), check, until_s)
        return (decided[0], decided[1][0]) if decided is not None and decided[1] else None

    def decide_each(
        self, hook: str, views: Iterable[Any], check: Callable[[Any], Any], until_s: float = math.inf
    ) -> tuple[str, list[Any]] | None:
        """Ask the owner about several views in one hand-over; see `decide`.

        `views` is iterated on the plug-in's thread, so a generator may end after enough answers.

        Returns:
            (plug-in name, answers to the views that were reached in time), or None.
        """
        if not self.decides(hook):
            return None
        name, plugin = self._owner[hook]
        function = getattr(plugin, hook)
        objections: list[str] = []

        def ask(view: Any) -> Any:
            answer = function(view)
            try:
                return check(answer)
            except BaseException as error:
                objections.append(f"{type(error).__name__}: {error}")

        try:
            # A plug-in that has not caught up since its last question costs no further wait.
            is_behind = until_s < math.inf and self.guards[name].is_behind()
            agreed = takewhile(lambda _: not objections, views)
            answers = [] if is_behind else self.guards[name].ask(hook, ask, agreed, until_s)
        except Switched:
            return None
        if objections:
            self.guards[name].switch_off(hook, "nonsense", objections[0])
            return None
        return name, answers

    def blame(self, hook: str, detail: str, kind: str = "nonsense") -> None:
        """Switch off the owner of a decision whose answers are valid one by one, and invalid together."""
        name, _ = self._owner[hook]
        self.guards[name].switch_off(hook, kind, detail)

    def is_overdue(self, hook: str, request: int, waited_s: float, limit_s: float) -> bool:
        """Whether a decision keeps a request waiting for too long; its owner is then switched off."""
        if waited_s <= limit_s:
            return False
        self.blame(hook, f"request {request} was kept waiting for {waited_s:.1f} s")
        return True

    def listens(self, hook: str) -> bool:
        return bool(self._listeners[hook])

    def notify(self, hook: str, notice: Any) -> None:
        """Call every listener now."""
        for name, plugin in self._listeners[hook]:
            self.call_one(name, hook, getattr(plugin, hook), notice)

    def post(self, hook: str, notice: Any, but: str | None = None) -> None:
        """Post to every listener except `but`; each gets it with its next call or the next `flush`."""
        for name, plugin in self._listeners[hook]:
            if name != but:
                self.guards[name].post(hook, getattr(plugin, hook), notice)

    def flush(self, after_s: float = 0.0) -> None:
        """Run posted calls of each plug-in whose first one has waited for `after_s`."""
        for guard in self.guards.values():
            try:
                guard.flush(after_s)
            except Switched:
                continue

    def hand_over(self) -> float:
        """Start posted calls without waiting. Returns seconds after which to call this again, or infinity."""
        soonest_s = math.inf
        for guard in self.guards.values():
            try:
                soonest_s = min(soonest_s, guard.hand_over())
            except Switched:
                continue
        return soonest_s

    def call_one(self, name: str, hook: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return the result of one plug-in's function, or None if it is off."""
        try:
            return self.guards[name].call(hook, function, *args)
        except Switched:
            return None

    def listeners(self, hook: str) -> list[tuple[str, Plugin]]:
        return self._listeners[hook]

    def exchange_policy(self, tier: Tier, policy: str, options: dict[str, Any]) -> str:
        """Ask the plug-in that has eviction policies for another one; return the name of the former one.

        Raises:
            PolicyError: as the plug-in's. Nothing has changed.
            PluginError: no plug-in has policies, or the call switched it off.
        """
        users = [(name, plugin) for name, plugin in self._users("exchange_policy") if self.guards[name].healthy]
        if not users:
            raise PluginError(
                "no plug-in of this engine has eviction policies; start the engine with one (--kv-policy NAME)."
            )
        name, plugin = users[0]

        def attempt() -> str | PolicyError:
            try:
                return str(plugin.exchange_policy(tier, policy, options))
            except PolicyError as error:  # of the request, not of the plug-in, which must stay on
                return error

        answer = self.call_one(name, "exchange_policy", attempt)
        if isinstance(answer, PolicyError):
            raise answer
        if answer is None:
            fault = self.guards[name].fault
            raise PluginError(f"plug-in {name} was switched off: {fault.detail.splitlines()[-1] if fault else 'it has ended'}")
        return answer

    def plugin_reports(self) -> dict[str, dict[str, Any]]:
        """Return reports of healthy plug-ins by name. They run on the plug-ins' threads, within the time limit."""
        reports = {}
        for name, plugin in self.plugins:
            if overrides(plugin, "report") and not self._closed:
                report = self.call_one(name, "report", lambda plugin=plugin: plain_numbers(plugin.report()))
                if report is not None:
                    reports[name] = report
        return reports

    def report(self) -> dict[str, Any]:
        """Return counters that can be pickled or written as JSON."""
        return {
            "calls": [
                [name, hook, count] for name, guard in self.guards.items() for hook, count in guard.calls.copy().items()
            ],
            "faults": [[fault.plugin, fault.hook, fault.kind, 1] for fault in self.faults],
            "enabled": {name: guard.healthy for name, guard in self.guards.items()},
        }

    def close(self, within_s: float = math.inf) -> None:
        """Close all plug-ins once; later calls do nothing.

        A plug-in that is still busy after `within_s` is abandoned. One that was switched off is closing already, and gets a few
        seconds to end.
        """
        if self._closed:
            return
        self._closed = True
        for name, plugin in self.plugins:
            if name in self._closers:
                self._closers[name].join(min(within_s, CLOSE_S))
                continue
            self.guards[name].extend(CLOSE_S)
            with suppress(Switched):
                self.guards[name].ask(
                    "close", lambda _, plugin=plugin: plugin.close(), (None,), time.monotonic() + within_s
                )
            self.guards[name].stop()
        self.recorder.write("close")  # a record without it stops before its engine did
        self.recorder.close()

    def _users(self, hook: str) -> list[tuple[str, Plugin]]:
        return [(name, plugin) for name, plugin in self.plugins if overrides(plugin, hook)]

    def _on_fault(self, fault: PluginFault) -> None:
        self.faults.append(fault)
        last_line = fault.detail.splitlines()[-1]
        self.recorder.write("fault", plugin=fault.plugin, hook=fault.hook, kind=fault.kind, detail=last_line)
        # Others may want what it holds, such as a locked folder. No wait here: this may be the engine's thread.
        closer = threading.Thread(target=self._close_faulty, args=(fault.plugin,), name="sagellm-closer", daemon=True)
        self._closers[fault.plugin] = closer
        closer.start()

    def _close_faulty(self, name: str) -> None:
        self.guards[name].stop()
        self.guards[name].join(CLOSE_S)  # a hook that never returns must not keep what others want
        try:
            dict(self.plugins)[name].close()
        except BaseException as error:  # a plug-in may raise anything
            logger.error("plug-in %s, which is switched off, failed to close: %r", name, error)


def plain_numbers(report: Any, depth: int = 4) -> dict[str, Any]:
    """Return the numbers of nested dictionaries, with text keys; other values are left out. Raises what reading it raises."""
    found: dict[str, Any] = {}
    for key, value in dict(report).items():
        if isinstance(value, dict):
            if depth > 1:
                found[str(key)] = plain_numbers(value, depth - 1)
        elif isinstance(value, (int, float, np.number)):
            found[str(key)] = float(value)
    return found
