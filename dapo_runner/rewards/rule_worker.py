"""The process of the rules `math`, `json` and `reasoning_gym`. It reads requests and writes verdicts as JSON lines.

``workers`` starts it with the rule's name, and kills it. It imports nothing of this package, to start quickly. Time and
memory are limited, because a model writes the texts that it judges.
"""

import dis
import json
import logging
import math
import os
import re
import resource
import runpy
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

MEMORY = 4 * 2**30  # bytes of address space
MATH_WINDOW = 2000  # characters at the end of a response that `math` reads
SHOWN = 200  # characters of an extracted answer in a verdict
ANSWER_WINDOW = 10_000  # characters at the end of a response that `reasoning_gym` reads
ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
ASCII = {0xFEE0 + n: n for n in range(33, 127)} | dict.fromkeys(map(ord, "−﹣"), "-")  # by full-width character
# What may begin a number in groups of three digits: no index, exponent or argument. `(1,\!200)` may be two numbers.
START = r"(?<![\w.^}])(?<!(?:frac|sqrt) )(?:(?<![(\[,!])(?<!\\\{)|(?=\d+\\))[1-9]\d{0,2}"
GROUPED = re.compile(rf"(?a){START}(?:(?:\{{,\}}|,\\!|\\[,;:! ]|[\xa0\u2009\u202f’])\d{{3}})+(?!\d)")
# Numbers, single letters and commands: math_verify would read the first number. But no number with a unit.
UNIT = r"(?!-?[\d.,]+ [A-Zm](?:\^\d)?\Z)"
BARE = re.compile(UNIT + r"(?:[\d\s+*/^_=<>!|.,;:()[\]{}'π-]|(?i:(?<![a-z])[a-z](?![a-z])|\\(?:[a-z]++|[,!:; {}])))++")
MIXED = re.compile(r"(?<![\w.,/^}])(\d+)(?: |\\,)(\d+)/(\d+)(?![\d/])")  # 1 1/2
# Language and content of a block. It also ends where another one begins or could begin: so the time is linear.
INFO = r"(?:(?<!`)[ \t][^\n`]*|[ \t]*)\r?"
ENDS = rf"(?<=\n)[ \t]*(?:(?=```[\w+#.-]+{INFO}\n)|```)|```(?=[\w+#.-]*{INFO}(?:\n|\Z))"
FENCED = re.compile(rf"(?s)```([\w+#.-]*){INFO}\n(.*?)(?:{ENDS})")
READABLE = (sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/etc/ld.so.cache")  # readable during scoring
load_code = lru_cache(runpy.run_path)
SCORE_SECONDS = 3600  # of CPU time; the timeout of a request is much shorter
FORMATS = ("date", "email", "ipv4", "ipv6", "regex", "uuid")  # checked on every machine
# What an evaluated answer may name, beside single letters. sympy imports itself.
NAMES = "sympy Integer Float Rational Symbol Function pi sqrt exp log sin cos tan asin acos atan sinh cosh tanh"


class RefusedError(Exception):
    """The ground truth is not a JSON schema."""


def verdict(rule: str, extracted: str | None = None, correct: bool = False) -> dict[str, Any]:
    return {"correct": correct, "extracted": extracted, "rule": rule}


def judge_math(text: str, answer: str, values: Any = None) -> dict[str, Any]:
    """Compare the answer in ``text`` with the ground truth. ``values`` assigns numbers to the answer's variables."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from sympy import FiniteSet

    def read(text: str, *formats: Any) -> Any:
        text = MIXED.sub(lambda one: f"{int(one[1]) * int(one[3]) + int(one[2])}/{one[3]}", plain_numbers(text))
        return parse(text, list(formats), parsing_timeout=None, raise_on_error=True)

    if not (gold := read(rf"\boxed{{{answer}}}", LatexExtractionConfig())):
        raise ValueError("no mathematics in the ground truth")
    tail = text[-MATH_WINDOW:]
    if r"\boxed" not in tail and (lines := ANSWER_LINE.findall(plain_numbers(tail))):
        line = lines[-1].strip(" *.`")
        if BARE.fullmatch(line):
            tail = f"${line}$"
    before, box, after = tail.rpartition(r"\boxed")
    earlier, _, paragraph = before.rpartition("\n\n")
    result, last = verdict("none"), set[str]()
    # math_verify may take several boxes together, as a set. Those of the last paragraph may correct earlier ones. All
    # must include those of the last paragraph, so that no earlier box alone is a second guess.
    for part in (paragraph + box + after, tail) if r"\boxed" in earlier else (tail,):
        if result["correct"] or not (found := read(part, LatexExtractionConfig(), ExprExtractionConfig())):
            continue
        sets = () if isinstance(found[0], str) else found[0].atoms(FiniteSet)
        members = {str(one) for many in sets for one in many.args} or {str(found[0])}
        if last <= members:
            last = members
            if values:
                found = [found[0].subs({x: values[x.name] for x in found[0].free_symbols if x.name in values})]
            correct = bool(verify(gold, found, timeout_seconds=None, raise_on_error=True))
            result = verdict("math-verify", str(found[0])[:SHOWN], correct)
    return result


def plain_numbers(text: str) -> str:
    r"""Write full width in ASCII, all minus signs as `-`, and `1{,}234`, `1,\!234` and `1\,234` as `1234`."""
    text = re.sub("，(?=[0-9])", ", ", text).translate(ASCII)  # in Chinese, 18，200 are two numbers
    return GROUPED.sub(lambda found: re.sub("[^0-9]", "", found[0]), text)


def judge_json(text: str, answer: str) -> dict[str, Any]:
    """Validate the last block of JSON, else the last one without a language, else the text before a fence."""
    validator = json_validator(answer)
    blocks = {bool(language): block for language, block in FENCED.findall(text) if language.lower() in ("", "json")}
    content = blocks.get(True, blocks.get(False, text.partition("\n```")[0]))
    try:
        value = json.loads(content, parse_constant=finite, parse_float=finite)
        # Lone surrogates cannot be printed.
        shown = json.dumps(value, sort_keys=True, ensure_ascii=False)[:SHOWN].encode("utf-8", "backslashreplace")
    except (ValueError, RecursionError):
        return verdict("none")
    return verdict("json-schema", shown.decode(), bool(validator.is_valid(value)))


def finite(text: str) -> float:
    """Return a number. Raises ValueError for NaN, infinities and numbers too large for a float, such as 1e999."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no finite number")
    return number


@lru_cache(maxsize=1024)
def json_validator(schema: str) -> Any:
    """Return the validator of a schema. It fetches nothing. Raises RefusedError, also for a reference to nothing."""
    from jsonschema import FormatChecker
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY
    from referencing.jsonschema import specification_with

    try:
        content = json.loads(schema)
        kind = validator_for(content)
        kind.check_schema(content, format_checker=kind.FORMAT_CHECKER)
        draft = specification_with(kind.META_SCHEMA["$schema"])
        root = draft.create_resource(content)
        schemas, seen = [(root, REGISTRY.resolver_with_root(root))], set()
        for part, resolver in schemas:  # each adds those in it and those that it refers to
            keys = part.contents.keys() & kind.VALIDATORS.keys() if isinstance(part.contents, dict) else set()
            for key in keys & {"$ref", "$dynamicRef"}:
                target = resolver.lookup(part.contents[key])
                if id(target.contents) not in seen:
                    seen.add(id(target.contents))
                    validator_for(target.contents, kind).check_schema(target.contents)
                    schemas.append((draft.detect(target.contents).create_resource(target.contents), target.resolver))
            schemas += [(inner, resolver.in_subresource(inner)) for inner in part.subresources()]
    except Exception as error:
        raise RefusedError(f"{schema[:80]!r}: {str(error).splitlines()[0]}") from error
    return kind(content, registry=REGISTRY, format_checker=FormatChecker(FORMATS))


def judge_reasoning_gym(text: str, answer: str) -> dict[str, Any]:
    """Score a text with the task that ``answer`` describes. The answer is the content of the last <answer> tag, else of
    the last `Answer: …` line, else the whole text. Scores are in [0, 1]; 1 is correct. Some tasks evaluate the answer
    as Python code: a confined child process computes the score, and refuses code that does more than arithmetic.
    """
    task, entry = gym_problem(answer)
    tail = text[-ANSWER_WINDOW:]
    tags, lines = ANSWER_TAG.findall(tail), [line.strip(" \t\r*`$") for line in ANSWER_LINE.findall(tail)]
    found, rule = (tags[-1], "answer-tag") if tags else (lines[-1], "answer-line") if lines else (tail, "whole")
    found = found.strip()
    # The scoring function of countdown does not count numbers such as 0xa4, 1e2 and x/x.
    is_counted = entry["metadata"]["source_dataset"] != "countdown" or not re.search(r"[^0-9\s()+*/-]", found)
    score = run_confined(lambda: float(task.score_answer(found if is_counted else "", entry)))
    return {**verdict(rule, found[:SHOWN], score >= 1.0), "value": min(1.0, max(0.0, score))}


def run_confined(function: Callable[[], float]) -> float:
    """Return the result of ``function``, called in a confined child process. Raises ValueError if it fails."""
    confinement = load_code(str(Path(__file__).with_name("code_worker.py")))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(writing, 0)
            os.closerange(1, 256)  # it must not access requests and verdicts
            confinement["hide_files"]([path for path in READABLE if os.path.exists(path)])
            confinement["confine"](MEMORY, SCORE_SECONDS)
            sys.addaudithook(refuse_programs)  # nothing can remove it
            os.write(0, repr(function()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        written = pipe.read()
    os.waitpid(child, 0)
    return float(written)


def refuse_programs(event: str, arguments: Any) -> None:
    """Raise ValueError before Python evaluates a string with a function, loop, assignment, or name not in ``NAMES``."""
    if event != "exec" or (code := arguments[0]).co_filename != "<string>":  # modules have files
        return
    stores = any(step.opname.startswith("STORE_") for step in dis.get_instructions(code))  # loops are inlined from 3.12
    names = {name for name in code.co_names if name[1:]}
    if stores or names - set(NAMES.split()) or type(code) in map(type, code.co_consts):
        raise ValueError("the answer is a program")


@lru_cache(maxsize=256)
def gym_problem(problem: str) -> tuple[Any, Any]:
    """Return a task of reasoning-gym and one of its entries, from name, configuration and index as JSON."""
    from reasoning_gym import create_dataset

    parts = json.loads(problem)
    task = create_dataset(parts["name"], **parts["config"])
    return task, task[parts["index"]]


def answer_request(judge: Any, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return judge(**request)
    except RefusedError as error:
        return {"refused": str(error)}
    except MemoryError:
        raise  # the rest of the memory may not suffice for the next text: a new worker is started
    except Exception:  # parsers raise many types for hostile text; the error is counted
        return verdict("error")


def main() -> None:
    sys.path.pop(0)  # the folder of this file
    # Signals that stop a run reach all its processes, but the current step still needs this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    judge = {"math": judge_math, "json": judge_json, "reasoning_gym": judge_reasoning_gym}[sys.argv[1]]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries may print; only verdicts go to stdout
    answer_request(judge, {"text": "1", "answer": "{}"})  # import packages outside of any request's timeout
    print("ready", file=answers, flush=True)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # If the parent was killed, nobody kills this process: the default action of the alarm ends it.
        signal.setitimer(signal.ITIMER_REAL, 2 * request.pop("timeout") + 1)
        found = answer_request(judge, request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
