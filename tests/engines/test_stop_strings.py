"""A check that begins with the newest token finds every end of a stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from mtrl.engines.local.stop_strings import StopStrings, span

STOPS = [
    "</a>",
    "user",
    "é",
    "aé",
    "日本",
    "\n",
    "o ",
    " ",
    "\ufffd",
    "w",
    "",
    "<|im_end|>",
    "ll",
    ". ",
    "관찰결과:",
    "🛑🛑🛑",
]


def in_pieces():
    """Decode as SentencePiece does: a space begins a word, and the first space of a text is dropped."""
    words = ["<unk>", "▁user", "user", "▁", "▁o", ".", "l", "</a", ">", "<0xC3>", "<0xA9>", "<0x0A>", "é"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    metaspace = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([metaspace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_a_turn_ends_at_the_token_that_completes_a_stop_string(kind, chatml_tokenizer):
    tokenizer = chatml_tokenizer if kind == "bytes" else in_pieces()
    spelt = [
        tokenizer.encode(text, add_special_tokens=False)
        for text in ("</a>", "user", "é日本", "o \n", "hello", "관찰결과:", "🛑🛑🛑")
    ]
    ids = st.integers(0, len(tokenizer) - 1)
    pieces = st.one_of(st.lists(ids, min_size=1, max_size=2), st.sampled_from([word for word in spelt if word]))

    @settings(max_examples=400, deadline=None)
    @given(st.lists(pieces, min_size=1, max_size=8), st.lists(st.sampled_from(STOPS), min_size=1, max_size=2))
    def check(words, stops):
        sampled, texts, ours = [id for word in words for id in word], tuple(stops), StopStrings(tokenizer)
        for end in range(1, len(sampled) + 1):
            tail = sampled[:end][-span(texts) :]
            completes = ours.complete(tail, texts)
            assert completes == any(text in tokenizer.decode(sampled[:end]) for text in texts)
            if completes:
                assert ours.may_complete(sampled[end - 1], texts)
                return  # the turn is over

    check()


def test_a_stop_string_is_completed_by_the_newest_token_alone():
    """The byte 0xC3 and a line break are two replacement characters, and the line break alone is one."""
    stops = StopStrings(in_pieces())
    ids = [9, 11, 0, 0, 0, 8]
    tail = ids[-span(("\n",)) :]
    assert tail[0] == 11 and not stops.complete(tail, ("\n",)) and stops.complete([*tail[1:], 11], ("\n",))


def test_most_tokens_are_decided_by_their_own_text(chatml_tokenizer):
    stops, texts = StopStrings(chatml_tokenizer), ("</sql>", "</a>")
    ids = {text: chatml_tokenizer.encode(text, add_special_tokens=False) for text in ("a", ">", "é")}
    assert not stops.may_complete(ids["a"][-1], texts) and stops.may_complete(ids[">"][-1], texts)
    assert stops.may_complete(ids["é"][-1], texts), "half of a character could be anything"
