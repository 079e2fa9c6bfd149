"""A spawned process loads its libraries without searching them for garbage, and searches afterwards."""

import gc
import multiprocessing

from sagellm.serve.following import FollowingProcess


class AsItArrives:
    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state, collected=gc.isenabled())


def tell(arrived, pipe) -> None:
    pipe.send((arrived.collected, gc.isenabled(), gc.get_freeze_count() > 0))


def test_garbage_is_collected_once_everything_is_loaded():
    receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    arrived = AsItArrives()
    arrived.number = 1  # or there is no state
    process = FollowingProcess(target=tell, args=(arrived, sender))
    process.start()
    assert receiver.poll(60) and receiver.recv() == (False, True, True)
    process.join()
    assert process.exitcode == 0
