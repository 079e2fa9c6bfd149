"""Work of a worker for a master: points behind a plan that the master has written, or whole answers."""

import contextlib
import threading
from typing import Any

from sagellm.accel.sot.group import Complete, Tasks, Worker, WorkerResult
from sagellm.accel.sot.results import Listener, SchedulePlan, ScheduleResult
from sagellm.core.errors import PeerError
from sagellm.core.running import Transfer

__all__ = ["write_for_master"]


def write_for_master(sot: Any, worker: Worker) -> None:
    """Write what a master wants until it has gone. Several answers at once, each on a thread with a copy of `sot`.

    Args:
        sot: a `SpecSoT`.
    """
    running: dict[int, tuple[threading.Thread, Any]] = {}
    while (message := worker.receive_tasks_from_master()) is not None:
        if isinstance(message, Complete):
            _, at_work = running.pop(message.answer, (None, None))
            if at_work is not None:
                at_work.cancel()
            continue
        own = sot.anew(message.may_be_direct, message.params)
        thread = threading.Thread(target=_write, args=(own, worker, message), name=f"sagellm-sot-{message.answer}")
        running[message.answer] = thread, own
        thread.start()
    for thread, own in running.values():
        own.cancel()
        thread.join()


def _write(sot: Any, worker: Worker, tasks: Tasks) -> None:
    """Send what comes of the tasks, unless the master has ended them."""
    try:
        if tasks.branches:
            _write_points(sot, worker, tasks)
        else:
            answer = sot.generate(tasks.question, history=tasks.history, **tasks.options)
            worker.send_results_to_master(WorkerResult(answer=tasks.answer, whole=answer))
    except PeerError:
        pass  # the master has gone
    except Exception as error:  # whatever it is, the master must not wait for it
        if not sot.is_cancelled:
            with contextlib.suppress(PeerError):
                worker.send_results_to_master(WorkerResult(answer=tasks.answer, error=f"{type(error).__name__}: {error}"))
    finally:
        sot.cancel()


def _write_points(sot: Any, worker: Worker, tasks: Tasks) -> None:
    class Sending(Listener):
        def ended(self, branch_id: int, reason: str) -> None:
            request = sot.by_branch[branch_id]
            found = {"token_ids": request.token_ids, "finish_reason": reason, "guesses": request.guesses[:2] or (0, 0)}
            worker.send_results_to_master(WorkerResult(answer=tasks.answer, branch_id=branch_id, **found))

    plan = sot.take_plan(tasks.prefix, Transfer(tasks.source, tasks.transfer_id))
    ids = tuple(info.branch_id for info in tasks.branches)
    schedule = ScheduleResult(SchedulePlan((ids,), tasks.max_parallel), ids, tasks.branches)
    sot.parallel_decode(plan, tasks.branches, schedule, listener=Sending(), **tasks.options)
