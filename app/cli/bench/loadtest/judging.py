"""What became of each request: the sim's answers byte for byte, others by what can be seen without knowing them."""

from __future__ import annotations

from typing import Any, Protocol

from app.cli.bench.chaos.answers import Fate, Got, SimAnswers, refusal, request_body
from app.cli.bench.chaos.learned import told
from app.cli.bench.chaos.plan import Manner, Question
from app.cli.bench.loadtest.records import Answered
from workers.engines.sim.tokens import render_chat


class Judge(Protocol):
    """``how`` names what is looked at."""

    how: str

    def judge(self, question: Question, answer: Answered) -> tuple[Fate, str]:
        """What became of it, and a sentence if that is not good."""


class SimJudge:
    """Knows every byte."""

    how = "bytes"

    def __init__(self, answers: SimAnswers, model: str) -> None:
        self._answers = answers
        self._model = model

    def judge(self, question: Question, answer: Answered) -> tuple[Fate, str]:
        if question.manner is Manner.REALTIME:
            return self._session(question, answer)
        return self._answers.judge(question, request_body(question, self._model), _got(answer))

    def _session(self, question: Question, answer: Answered) -> tuple[Fate, str]:
        turns: list[tuple[str, str]] = []
        for prompt, said in zip(question.prompts, answer.said, strict=False):
            turns.append(("user", prompt))
            expected = self._answers.text(render_chat(turns), question.tokens)
            if said != expected:
                return Fate.WRONG, f"{said[:200]!r} for {expected[:200]!r}"
            turns.append(("assistant", said))
        return _session(question, answer)


class FormJudge:
    """Knows what every answer must have: its end, one id, one time of creation, and no error."""

    how = "form"

    def judge(self, question: Question, answer: Answered) -> tuple[Fate, str]:
        if question.manner is Manner.REALTIME:
            return _session(question, answer)
        if (refused := refusal(_got(answer))) is not None:
            return Fate.REFUSED, refused
        if answer.status not in (0, 200):
            return Fate.LOST, f"status {answer.status}: {answer.body[:300]!r}"
        said = told(question, answer.body)
        if said.error:
            return Fate.LOST, said.error
        if len(said.ids) > 1 or len(said.times) > 1:
            return Fate.WRONG, f"ids {sorted(said.ids)}, created {sorted(said.times)}"
        if answer.left:
            return Fate.LEFT, ""
        if answer.broken or not said.ended:
            return Fate.LOST, answer.broken or "an orderly end without the answer's own"
        return Fate.GOOD, ""


def _session(question: Question, answer: Answered) -> tuple[Fate, str]:
    if answer.broken or len(answer.said) < len(question.prompts):
        status = "" if answer.status in (0, 101) else f" (status {answer.status})"
        return Fate.LOST, f"{answer.broken or 'the session ended'}{status}"
    return Fate.GOOD, ""


def _got(answer: Answered) -> Got:
    taken: dict[str, Any] = {
        name: getattr(answer, name)
        for name in ("status", "body", "sent_at", "done_at", "broken", "left", "retry_after")
    }
    return Got(**taken)
