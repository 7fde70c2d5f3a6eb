"""One worker of the ``math`` rule: a verdict for each request, both JSON, over the pipe whose descriptor
``math_rule`` starts it with.

It is a process so that it can be killed, and it imports nothing of this package so that it starts quickly. What it
judges was written by a model: it may ask for any amount of time or memory, and gets neither.
"""

import json
import logging
import resource
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

MEMORY = 4 * 2**30  # bytes of address space
SHOWN = 200  # characters of an extracted answer that are passed on


def judge(text: str, answer: str | None = None, other: str | None = None) -> dict[str, Any]:
    """{"correct", "extracted", "rule"}; rule "none" without an answer in the text, "error" when judging failed.

    The text is held against the ground truth ``answer``, or against what another text, ``other``, answers.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    def read(text: str, *formats: Any) -> Any:
        return parse(text, list(formats), parsing_timeout=None, raise_on_error=True)

    latex, plain = LatexExtractionConfig(), ExprExtractionConfig()
    try:
        gold = read(rf"\boxed{{{answer}}}", latex) if other is None else read(other, latex, plain)
        if not gold:
            raise ValueError("no mathematics in the ground truth")
        found = read(text, latex, plain)
        if not found:
            return {"correct": False, "extracted": None, "rule": "none"}
        correct = bool(verify(gold, found, timeout_seconds=None, raise_on_error=True))
        return {"correct": correct, "extracted": str(found[0])[:SHOWN], "rule": "math-verify"}
    except MemoryError:
        raise  # what is left of the memory is not enough for the next text either: a new worker
    except Exception:  # whatever a parser does with hostile text; it is counted
        return {"correct": False, "extracted": None, "rule": "error"}


def main() -> None:
    # Ctrl-C in a terminal, and what a job scheduler sends before it kills, reach every process, and the step under way
    # is finished nevertheless; this one ends when the pipe does.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    pipe = Connection(int(sys.argv[1]))
    judge("1", "1")  # imports and first-use costs do not count against anyone's deadline
    pipe.send_bytes(b"ready")
    with suppress(EOFError):
        while True:
            answer_one(pipe)


def answer_one(pipe: Connection) -> None:
    """Raises EOFError when the other end is gone."""
    request = json.loads(pipe.recv_bytes())
    # Nobody is left to kill this process when its parent was killed: the default action of the alarm does.
    signal.setitimer(signal.ITIMER_REAL, 2 * request["deadline"] + 1)
    verdict = judge(request["text"], request.get("answer"), request.get("other"))
    signal.setitimer(signal.ITIMER_REAL, 0)
    pipe.send_bytes(json.dumps(verdict).encode())


if __name__ == "__main__":
    main()
