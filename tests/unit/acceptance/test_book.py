"""Checks in order, within a span of time."""

from __future__ import annotations

import time

from kvpool.ops.acceptance.book import Book, NotRun, Task, Wrong
from kvpool.ops.acceptance.report import PARTS, Check


def _raise(error: Exception) -> str:
    raise error


def _statuses(book: Book) -> list[tuple[str, str]]:
    return [(check.name, check.status) for check in book.checks]


def test_what_fails_does_not_stop_the_others() -> None:
    said: list[str] = []
    book = Book(60, PARTS, said.append)
    tasks = [
        Task("wrong", lambda: _raise(Wrong("3 tokens differ"))),
        Task("broken", lambda: _raise(KeyError("choices"))),
        Task("silent", lambda: _raise(OSError("no answer from 10.0.0.1:80"))),
        Task("absent", lambda: _raise(NotRun("no such thing here", needed=False))),
        Task("good", lambda: "seen"),
    ]
    assert book.run("exactness", tasks)
    assert _statuses(book) == [
        ("wrong", "failed"),
        ("broken", "failed"),
        ("silent", "failed"),
        ("absent", "not run"),
        ("good", "passed"),
    ]
    assert [check.reason for check in book.checks] == [
        "3 tokens differ",
        "KeyError: 'choices'",
        "OSError: no answer from <address>",
        "no such thing here",
        "seen",
    ]
    assert not book.checks[3].needed
    assert len(said) == 4


def test_a_start_that_fails_leaves_the_rest_not_run() -> None:
    book = Book(60, PARTS, lambda line: None)
    tasks = [Task("start", lambda: _raise(OSError("gone")), stop=True), Task("next", lambda: ""), Task("last", lambda: "")]
    assert not book.run("faults", tasks)
    assert _statuses(book) == [("start", "failed"), ("next", "not run"), ("last", "not run")]
    assert book.checks[1].reason == "not possible without: start"
    assert book.checks[1].needed


def test_parts_not_asked_for_are_not_run_and_not_missed() -> None:
    book = Book(60, ["faults"], lambda line: None)
    book.run("exactness", [Task("cold", lambda: _raise(AssertionError("was run")))])
    assert book.checks == [Check("exactness", "cold", "not run", 0.0, "not asked for (--only)", needed=False)]


def test_no_check_begins_that_does_not_fit() -> None:
    book = Book(3.0, PARTS, lambda line: None)
    book.run(
        "exactness", [Task("long", lambda: _raise(AssertionError("was run")), seconds=5), Task("short", lambda: "", seconds=1)]
    )
    assert _statuses(book) == [("long", "not run"), ("short", "passed")]
    assert book.checks[0].reason == "the time was over"
    assert book.checks[0].needed


def test_a_check_cut_off_by_the_end_of_time_has_not_failed() -> None:
    book = Book(0.2, PARTS, lambda line: None)

    def cut_off() -> str:
        time.sleep(book.left(5) + 0.05)
        raise OSError("no answer within 0 s")

    book.run("exactness", [Task("cut off", cut_off, stop=True, seconds=0.1), Task("next", lambda: "", seconds=0)])
    assert _statuses(book) == [("cut off", "not run"), ("next", "not run")]
    assert book.left() == 0


def test_a_wrong_answer_at_the_end_of_time_is_still_wrong() -> None:
    book = Book(1.0, PARTS, lambda line: None)

    def late() -> str:
        time.sleep(1.1)
        raise Wrong("token 3 differs")

    book.run("exactness", [Task("late", late, seconds=0)])
    assert _statuses(book) == [("late", "failed")]
