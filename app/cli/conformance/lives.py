"""All checks, in the order in which one engine goes through them, and the lives that need an engine of their own."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from app.cli.conformance import answering, ending, waking
from app.cli.conformance.checks import Check, Life
from app.cli.conformance.subject import State

NEW, PARKED, AWAKE, ENDED = State.NEW, State.PARKED, State.AWAKE, State.ENDED

INITIALIZE_SECONDS: Final = 600.0
"""A large model is loaded from a slow disk."""

WHOLE: Final = Life(
    name="whole",
    checks=(
        Check(
            name="initialize",
            promise="initialize() ends, with the engine parked",
            needs=NEW,
            run=waking.initialize,
            seconds=INITIALIZE_SECONDS,
        ),
        Check(
            name="beats",
            promise="initialize() never holds up the event loop for as long as a keeper waits",
            needs=PARKED,
            run=waking.beats,
        ),
        Check(
            name="facts", promise="models, max_model_len, steps, busy, dead, kv_usage()", needs=PARKED, run=waking.facts
        ),
        Check(name="memory", promise="memory() is complete and without contradiction", needs=PARKED, run=waking.memory),
        Check(name="parked", promise="a parked engine has no KV pages", needs=PARKED, run=waking.parked),
        Check(
            name="self-test",
            promise="self_test() leaves it parked, and able to wake",
            needs=PARKED,
            run=waking.self_test,
        ),
        Check(
            name="self-test-cancelled",
            promise="self_test() that is cancelled leaves it parked, and able to wake",
            needs=PARKED,
            run=waking.self_test_cancelled,
        ),
        Check(name="wake", promise="wake() maps KV pages, and the engine is well", needs=PARKED, run=waking.wake),
        Check(name="custody", promise="custody() says how the service's pages stand", needs=AWAKE, run=waking.custody),
        Check(
            name="answer",
            promise="an answer is whole, repeatable, and advances steps",
            needs=AWAKE,
            run=answering.whole_answer,
        ),
        Check(name="stream", promise="streams are server-sent events up to [DONE]", needs=AWAKE, run=answering.streams),
        Check(name="busy", promise="busy is true as long as a request runs", needs=AWAKE, run=answering.busy),
        Check(
            name="client-leaves",
            promise="a request ends when its client leaves",
            needs=AWAKE,
            run=answering.client_leaves,
        ),
        Check(name="errors", promise="errors have OpenAI's form, and harm nothing", needs=AWAKE, run=answering.errors),
        Check(name="notes", promise="token notes stand before each unit, and fit", needs=AWAKE, run=answering.notes),
        Check(
            name="resume", promise="a stream goes on from any unit, byte for byte", needs=AWAKE, run=answering.resume
        ),
        Check(name="framed", promise="a whole answer with notes comes in a frame", needs=AWAKE, run=answering.framed),
        Check(
            name="wake-twice",
            promise="a second wake() is refused and harms nothing",
            needs=AWAKE,
            run=waking.wake_twice,
        ),
        Check(
            name="quiesce",
            promise="quiesce() keeps requests, and wake() goes on with them",
            needs=AWAKE,
            run=waking.quiesce,
        ),
        Check(
            name="park-with-requests",
            promise="park() with a request in flight: no step after it, no KV pages, and it can wake again",
            needs=AWAKE,
            run=waking.park_with_requests,
        ),
        Check(
            name="park-twice", promise="park() of a parked engine changes nothing", needs=PARKED, run=waking.park_twice
        ),
        Check(
            name="rounds",
            promise="waking and parking again and again leaves nothing behind",
            needs=PARKED,
            run=waking.rounds,
        ),
        Check(
            name="old-epoch",
            promise="wake() for an epoch that is over fails as the service says, and leaves it parked",
            needs=PARKED,
            run=waking.stale_epoch,
        ),
        Check(name="shutdown", promise="shutdown() ends within its time", needs=AWAKE, run=ending.shutdown),
        Check(
            name="shutdown-twice", promise="a second shutdown() changes nothing", needs=ENDED, run=ending.shutdown_twice
        ),
        Check(
            name="health-after",
            promise="check_health() of a dead engine raises EngineDeadError",
            needs=ENDED,
            run=ending.health_after,
        ),
        Check(
            name="left",
            promise="after shutdown() no lease, descriptor, thread, child, or file in /dev/shm or the temporary folder",
            needs=ENDED,
            run=ending.nothing_left,
        ),
    ),
)


def _leaves_nothing(name: str) -> Check:
    """What each way of ending is followed by."""
    return Check(name=name, promise="… leaves nothing", needs=ENDED, run=ending.nothing_left)


NEVER_INITIALIZED: Final = Life(
    name="never-initialized",
    checks=(
        Check(name="shutdown-new", promise="shutdown() before initialize()", needs=NEW, run=ending.shutdown_new),
        _leaves_nothing("left-new"),
    ),
)

INTERRUPTED: Final = Life(
    name="interrupted",
    checks=(
        Check(
            name="shutdown-initializing",
            promise="shutdown() after initialize() was cancelled",
            needs=NEW,
            run=ending.shutdown_while_initializing,
        ),
        _leaves_nothing("left-initializing"),
    ),
)

WITH_REQUESTS: Final = Life(
    name="with-requests",
    checks=(
        Check(
            name="initialize-again",
            promise="another engine of the same settings initializes",
            needs=NEW,
            run=waking.initialize,
            seconds=INITIALIZE_SECONDS,
        ),
        Check(
            name="shutdown-requests",
            promise="shutdown() with a request in flight, which ends, too",
            needs=AWAKE,
            run=ending.shutdown_with_requests,
        ),
        _leaves_nothing("left-requests"),
    ),
)

LIVES: Final = (WHOLE, NEVER_INITIALIZED, INTERRUPTED, WITH_REQUESTS)


def lives(*, initialize_seconds: float) -> list[Life]:
    """The same with another limit for ``initialize``."""

    def limited(check: Check) -> Check:
        return replace(check, seconds=initialize_seconds) if check.run is waking.initialize else check

    return [replace(life, checks=[limited(check) for check in life.checks]) for life in LIVES]
