"""The arguments with which `warm_up` calls the op.  No framework."""

from typing import Any

from onchip.frontend.warm_up import Make, Sizes, WarmUpCall


def _arguments(s: Sizes, make: Make) -> dict[str, Any]:
    teacher = s.teacher_hidden or s.hidden
    return {
        "student_hidden": make(s.tokens, s.hidden),
        "student_weight": make(s.vocab, s.hidden, of_weight=True),
        "teacher_hidden": make(s.tokens, teacher, constant=True),
        "teacher_weight": make(s.vocab, teacher, constant=True),
    }


CALLS = {"linear_jsd": WarmUpCall(("hidden", "vocab"), _arguments)}
