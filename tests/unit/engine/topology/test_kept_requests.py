"""Memory of abandoned MPI requests stays allocated until they complete."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from hpcstrat.engine.channel.waitable import Exchange, Message
from hpcstrat.engine.topology.kept_requests import keep, let_go_of_complete
from hpcstrat.parameter_server.mailbox import _Arriving, _Sending


class _Request:
    """A request like mpi4py's, which is falsy once its completion is known."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.done, self.fails, self.known = memory, False, False, False

    def __bool__(self) -> bool:
        return not self.known

    def Test(self) -> bool:  # noqa: N802
        if self.fails:
            raise RuntimeError("a rank has died")
        self.known = self.done
        return self.done

    @staticmethod
    def Testall(requests: list[_Request]) -> bool:  # noqa: N802
        return all(request.Test() for request in requests)


def exchange(request: _Request) -> Exchange:
    made = Exchange()
    made.requests.append(request)
    return made


def sending(request: _Request) -> _Sending:
    made = _Sending(request.memory)
    made.request = request
    return made


def arriving(request: _Request) -> _Arriving:
    made = _Arriving(0, b"", [request.memory])
    made.requests.append(request)
    return made


HOLDERS = {
    "message": lambda request: Message(lambda _: request, request.memory),
    "exchange": exchange,
    "sending": sending,
    "arriving": arriving,
}


@pytest.mark.parametrize("make", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("fails", [False, True])
def test_memory_is_kept_until_its_request_is_complete(make: Any, fails: bool) -> None:
    memory = np.zeros(3)
    request, seen = _Request(memory), weakref.ref(memory)
    holder = make(request)
    del memory, holder
    gc.collect()
    let_go_of_complete()
    whose = weakref.ref(request)
    request.done, request.fails = not fails, fails
    del request
    gc.collect()
    assert seen() is not None, "MPI may still write there"
    let_go_of_complete()
    assert seen() is None
    assert whose() is None


@pytest.mark.parametrize("make", HOLDERS.values(), ids=HOLDERS)
def test_nothing_is_kept_of_a_request_that_was_awaited(make: Any) -> None:
    memory = np.zeros(3)
    request, seen = _Request(memory), weakref.ref(memory)
    request.done = True
    holder = make(request)
    assert request.Test()
    del memory, request, holder
    gc.collect()
    assert seen() is None


def test_requests_are_let_go_of_in_any_order() -> None:
    requests = [_Request(np.zeros(1)) for _ in range(4)]
    keep(requests)
    seen = [weakref.ref(request) for request in requests]
    for number in (2, 0, 3, 1):
        requests[number].done = True
        requests[number] = None  # type: ignore[call-overload]
        let_go_of_complete()
        gc.collect()
        left = [one for one in seen if one() is not None]
        assert len(left) == sum(one is not None for one in requests)


def test_an_error_right_after_the_call_of_mpi_loses_no_request() -> None:
    own = Message.__init__.__code__, Exchange.__init__.__code__
    # Raise an error at each line of the constructors, in turn.
    for number in range(1, 20):
        memory, made, left = np.zeros(3), list[_Request](), [number]
        seen = weakref.ref(memory)

        def call(memory: Any, made: list[_Request] = made) -> _Request:
            made.append(_Request(memory))
            return made[0]

        def trace(frame: Any, what: str, _: Any, left: list[int] = left) -> Any:
            if what == "line" and frame.f_code in own:
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            Message(call, memory)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(None)
        was_made = bool(made)
        made.clear()
        del memory
        gc.collect()
        assert not was_made or seen() is not None, "MPI may still write there"
    assert number > 2
