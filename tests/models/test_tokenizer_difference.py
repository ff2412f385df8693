"""Two tokenizers differ if a token of the policy has another number, or a text other tokens; names do not matter."""

import copy
import json

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from mtrl.models.tiny import train_tokenizer
from mtrl.models.tokenizer_difference import difference

CORPUS = [[{"role": "user", "content": "the total is 12, and the name of the table is in the text"}]] * 4


def test_a_difference_names_the_token_or_the_text(tiny_tokenizer):
    twin = copy.deepcopy(tiny_tokenizer)
    twin.name_or_path = "another/name"
    assert difference(twin, tiny_tokenizer) is None
    twin.add_tokens(["<only the teacher>"])
    assert difference(twin, tiny_tokenizer) is None
    number = len(tiny_tokenizer)
    said = f"token {number} of the policy, '<only the teacher>', is no token of the teacher"
    assert difference(tiny_tokenizer, twin) == said
    plain, moved = (train_tokenizer(CORPUS, 340, tags) for tags in (("<sql>", "</sql>"), ("</sql>", "<sql>")))
    number = plain.convert_tokens_to_ids("<sql>")
    said = f"token {number} of the policy, '<sql>', is token {number + 1} of the teacher"
    assert difference(moved, plain) == said


def test_equal_vocabularies_may_split_a_text_otherwise(tiny_tokenizer):
    """Without its merges, the teacher splits words into letters; its vocabulary is the same."""
    state = json.loads(tiny_tokenizer.backend_tokenizer.to_str())
    state["model"]["merges"] = []
    letters = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    assert letters.get_vocab() == tiny_tokenizer.get_vocab()
    assert "split the text 'The total is 1,234.5'… into different tokens" in difference(letters, tiny_tokenizer)
