"""The scripted customer: a deterministic counterpart, which reveals its facts when the agent asks for them."""

from __future__ import annotations

import re
from typing import Protocol

from envs.service.case import Customer, Wish
from envs.service.speech import codes

ASKS = {
    "order_id": re.compile(r"order (?:number|id)|number of (?:your|the) order"),
    "postcode": re.compile(r"post ?code|postal code|zip"),
}
"""Words by which the agent asks for a fact."""
CONFIRMS = re.compile(r"\bconfirm|\bshall i\b|\bshould i\b|\bdo you want me to\b|\bwould you like me to\b")
"""Words by which the agent asks whether it should make a change."""
REFUSES = re.compile(r"\bcannot\b|\bcan ?not\b|\bcan[’']t\b|\bunable\b|\bnot possible\b|\bsorry\b|\bunfortunately\b")

WORDS = {
    "polite": {
        "cancel": "I would like to cancel the {item} that I ordered.",
        "address": "Please send the {item} that I ordered to {address}.",
        "refund": "I would like a refund for the {item} that I ordered.",
        "order_id": "My order number is {order_id}.",
        "postcode": "My postcode is {postcode}.",
        "yes": "Yes, please.",
        "change": "Wait, I have changed my mind. {wish}",
        "push": "Could you make an exception for me?",
        "accept": "All right.",
        "thanks": "Thank you, goodbye.",
        "repeat": "I do not understand. {wish}",
    },
    "blunt": {
        "cancel": "Cancel my {item}.",
        "address": "Send my {item} to {address}.",
        "refund": "I want my money back for the {item}.",
        "order_id": "Number {order_id}.",
        "postcode": "Postcode {postcode}.",
        "yes": "Do it.",
        "change": "No, I want something else now. {wish}",
        "push": "That is not good enough! I insist.",
        "accept": "Fine.",
        "thanks": "Bye.",
        "repeat": "What? {wish}",
    },
}
"""The customer's sentences, by voice and meaning."""


class Counterpart(Protocol):
    """The other side of the agent's conversation."""

    async def reply(self, speech: str) -> str:
        """Return the customer's answer to the agent's words."""


class ScriptedCustomer:
    """A customer that follows its facts and the agent's words alone: the same words get the same answers.

    The customer tells its order number and its postcode when the agent asks for them. After the agent's first decision
    (a question for a confirmation, or a refusal) a fickle customer replaces its request. A pushy customer insists once
    on a request that was refused.
    """

    def __init__(self, facts: Customer):
        self.facts = facts
        self.wishes, self.pushes = list(facts.wishes), facts.pushes
        self._told: set[str] = set()
        """Facts that the customer has told."""

    async def reply(self, speech: str) -> str:
        """Return the answer to the agent's words."""
        return self.answer(speech)

    def answer(self, speech: str) -> str:
        """Return the answer to the agent's words."""
        words = speech.casefold()
        confirms, refuses = CONFIRMS.search(words) is not None, REFUSES.search(words) is not None
        asked = [fact for fact in ASKS if self._is_asked(fact, words, refuses)]
        if asked:
            self._told.update(asked)
            return " ".join(map(self._say, asked))
        if (confirms or refuses) and len(self.wishes) > 1:
            del self.wishes[0]
            return self._say("change")
        if confirms:
            return self._say("yes")
        if refuses:
            self.pushes -= 1
            return self._say("push" if self.pushes >= 0 else "accept")
        return self._say("thanks" if codes(speech) - {self.facts.order_id} else "repeat")

    def _is_asked(self, fact: str, words: str, refuses: bool) -> bool:
        """Whether the words ask for a fact. An agent that names the value does not ask for it, and neither does one
        that refuses because of a fact that it was told."""
        if ASKS[fact].search(words) is None or getattr(self.facts, fact).casefold() in words:
            return False
        return not (refuses and fact in self._told)

    def _say(self, meaning: str) -> str:
        facts = self.facts
        values = {"order_id": facts.order_id, "postcode": facts.postcode, "wish": wish_text(facts, self.wishes[0])}
        return WORDS[facts.voice][meaning].format(**values)


def wish_text(facts: Customer, wish: Wish) -> str:
    """Return a request in the customer's words."""
    return WORDS[facts.voice][wish.kind].format(item=facts.item, address=wish.address)


def opening(facts: Customer) -> str:
    """Return the customer's first words."""
    return wish_text(facts, facts.wishes[0])
