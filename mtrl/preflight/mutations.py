"""Slightly malformed variants of right answers, which separate a strict parser from a lenient one."""

from __future__ import annotations

import json
import re

from mtrl.preflight.responses import BOXED, MARKED, NUMBER, TAGGED, THINKING, json_object, parts

OTHER_TAGS = ("final_response", "final_output", "final_answer", "answer", "response", "output", "result", "solution")
"""Common names of the tag that holds the answer."""


def mutations(response: str, wrong: str | None = None) -> dict[str, str]:
    """Return the changed responses by name of the change. `wrong` is a well-formed wrong response to place beside
    it."""
    made = {**_around(response), **_form(response), **_answer(response)}
    if wrong is not None:
        made |= {
            "a wrong answer before it": f"{wrong}\n{response}",
            "a wrong answer after it": f"{response}\n{wrong}",
            "both answers in one": parts(response).with_answer(f"{parts(wrong).answer} or {parts(response).answer}"),
        }
    return {name: text for name, text in made.items() if text != response}


def _around(response: str) -> dict[str, str]:
    """Return variants with other text around the response."""
    return {
        "text before": f"The answer is here: {response}",
        "text after": f"{response} I hope that this helps.",
        "a full stop after": f"{response}.",
        "a line after": f"{response}\n\nDone",
        "line breaks around": f"\n{response}\n",
        "repeated": f"{response}\n{response}",
        "in a code fence": f"```\n{response}\n```",
        "in bold": f"**{response}**",
        "in quotes": f'"{response}"',
        "only thought": f"<think>{response}</think>",
        "thought, then nothing": f"<think>{response}</think> I give up.",
    }


def _form(response: str) -> dict[str, str]:
    """Return variants with other tags and markers."""
    tags = [name for name in dict.fromkeys(m[1] for m in TAGGED.finditer(response)) if name.lower() not in THINKING]
    made = {}
    if tags:
        tag = tags[-1]
        for other in OTHER_TAGS:
            if other != tag:
                made[f"<{other}> for <{tag}>"] = _renamed(response, tag, other)
        made |= {
            f"<{tag.upper()}>": _renamed(response, tag, tag.upper()),
            f"<{tag} > with a space": response.replace(f"<{tag}>", f"<{tag} >"),
            f"</{tag}> left out": response.replace(f"</{tag}>", ""),
            f"<{tag}> left out": response.replace(f"<{tag}>", ""),
            f"[{tag}] for <{tag}>": response.replace(f"<{tag}>", f"[{tag}]").replace(f"</{tag}>", f"[/{tag}]"),
            "without tags": re.sub(r"</?\w+>", "", response),
            "the tag in the tag": response.replace(f"<{tag}>", f"<{tag}><{tag}>").replace(
                f"</{tag}>", f"</{tag}></{tag}>"
            ),
        }
    if MARKED.search(response):
        answer = parts(response).answer
        for other in ("###", "#####", "Answer:", "The answer is", "=", ""):
            made[f"{other or 'nothing'} for ####"] = re.sub(r"(?<!#)####(?!#)", other, response)
        made["\\boxed{} for ####"] = MARKED.sub(lambda _: f"\\boxed{{{answer}}}", response)
    if BOXED.search(response):
        made["no \\boxed{}"] = BOXED.sub(r"\1", response)
    return made


def _answer(response: str) -> dict[str, str]:
    """Return variants of the answer itself."""
    around = parts(response)
    answer = around.answer.strip()
    made = {
        "the bare answer": answer,
        "answer in upper case": around.with_answer(answer.upper()),
        "answer in lower case": around.with_answer(answer.lower()),
        "spaces around the answer": around.with_answer(f"  {answer}  "),
        "answer in a code fence": around.with_answer(f"```\n{answer}\n```"),
        "answer in quotes": around.with_answer(f'"{answer}"'),
        "a full stop in the answer": around.with_answer(f"{answer}."),
        "more in the answer": around.with_answer(f"{answer} or so"),
        "half of the answer": around.with_answer(answer[: len(answer) // 2]),
    }
    if NUMBER.fullmatch(answer):
        made |= {f"{other} for the number": around.with_answer(other) for other in ("nan", "inf")}
    if re.fullmatch(r"-?\d+", answer):  # a digit behind a decimal number may be within its tolerance
        made |= {
            "a digit before the number": around.with_answer(re.sub(r"(\d+)", r"1\1", answer)),
            "a digit after the number": around.with_answer(f"{answer}1"),
        }
    fields = json_object(answer)
    if fields:
        first = next(iter(fields))
        made |= {
            "single quotes in the JSON": around.with_answer(str(fields)),
            "a comma too many in the JSON": around.with_answer(re.sub(r"\}\s*\Z", ",}", answer)),
            "a field left out": around.with_answer(json.dumps({k: v for k, v in fields.items() if k != first})),
            "a field too many": around.with_answer(json.dumps({**fields, "zq": "zq"})),
            "field names in upper case": around.with_answer(json.dumps({k.upper(): v for k, v in fields.items()})),
            "values in lists": around.with_answer(json.dumps({k: [v, "zq"] for k, v in fields.items()})),
            "every field nested": around.with_answer(json.dumps({"answer": fields})),
        }
    return made


def _renamed(response: str, tag: str, other: str) -> str:
    return response.replace(f"<{tag}>", f"<{other}>").replace(f"</{tag}>", f"</{other}>")
