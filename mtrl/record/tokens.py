"""Decoding of single token ids with the tokenizer that the run stored."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mtrl.record.reading import read
from mtrl.record.run_dir import RunDir

LARGEST_TOKENIZER = 256 * 2**20
"""Maximum size of a tokenizer.json, in bytes."""


@dataclass(frozen=True)
class Pieces:
    """The text of each token id. A character belongs to the token that holds its first byte."""

    texts: list[str]
    special: list[int]
    """Indices of tokens that represent no text, such as `<|end|>`, or that the tokenizer does not know."""
    continued: list[int]
    """Indices of tokens that only hold the rest of a character; their text is empty."""


class Tokenizer:
    """Decoder of the tokens of a `tokenizer.json`.

    Byte-level and byte-fallback tokens are joined byte by byte, because one character can need several tokens. Bytes
    that are not UTF-8 are shown as U+FFFD. Special tokens are shown by their names.
    """

    def __init__(self, path: Path):
        """Load the tokenizer.

        Args:
            path: `FOLDER/tokenizer.json` of a run.

        Raises:
            ValueError: The file is not a tokenizer.
        """
        from tokenizers import Tokenizer as Library

        try:
            text = read(path, path.parent.parent, LARGEST_TOKENIZER).decode()
            self._library = Library.from_str(text)
            self._to_bytes = bytes_rule(json.loads(text).get("decoder"))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path.parent.name}/{path.name} is no tokenizer ({error})") from error
        self._added = self._library.get_added_tokens_decoder()
        self._known: dict[int, bytes | None] = {}

    def pieces(self, ids: Sequence[int]) -> Pieces:
        """Return the texts of `ids`; joined, they are the decoded text."""
        parts = [self._bytes(token_id) for token_id in ids]
        owners = [place for place, data in enumerate(parts) for _ in data or b""]
        texts = [""] * len(ids)
        start = 0
        for char, length in characters(b"".join(data or b"" for data in parts)):
            texts[owners[start]] += char
            start += length
        continued = [place for place, data in enumerate(parts) if data and not texts[place]]
        special = []
        for place, token_id in enumerate(ids):
            if parts[place] is None:
                texts[place] = f"<{token_id}>"
            if parts[place] is None or (token_id in self._added and self._added[token_id].special):
                special.append(place)
        return Pieces(texts, special, continued)

    def _bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token; None if the tokenizer has no such token."""
        if token_id not in self._known:
            if token_id in self._added:
                self._known[token_id] = self._added[token_id].content.encode()
            else:
                token = self._library.id_to_token(token_id) if 0 <= token_id < 2**32 else None
                self._known[token_id] = None if token is None else self._to_bytes(token)
        return self._known[token_id]


def find_tokenizer(run: Path) -> tuple[Tokenizer | None, list[str]]:
    """Return the tokenizer of a run or of its export, and sentences about tokenizers that cannot be read."""
    problems: list[str] = []
    for path in tokenizer_files(run):
        if path.is_file():
            try:
                return Tokenizer(path), problems
            except ValueError as error:
                problems.append(str(error))
    return None, problems


def tokenizer_files(run: Path) -> list[Path]:
    """Return the possible paths of a run's tokenizer, the preferred one first."""
    return [folder / "tokenizer.json" for folder in (RunDir(run).tokenizer, RunDir(run).export)]


def characters(data: bytes) -> Iterator[tuple[str, int]]:
    """Yield every character with the number of its bytes. A byte that belongs to no character is U+FFFD."""
    for char in data.decode("utf-8", "surrogateescape"):
        yield ("\ufffd", 1) if "\udc80" <= char <= "\udcff" else (char, len(char.encode()))


def bytes_rule(decoder: Any) -> Callable[[str], bytes]:
    """Return the function from token names to bytes, according to the `decoder` of a tokenizer.json."""
    kinds = {step["type"]: step for step in _steps(decoder)}
    if "ByteLevel" in kinds:
        return byte_level
    if "WordPiece" in kinds:
        prefix = str(kinds["WordPiece"].get("prefix", "##"))
        return lambda token: (token.removeprefix(prefix) if token.startswith(prefix) else f" {token}").encode()
    spaced = "▁"
    fallback = "ByteFallback" in kinds

    def sentencepiece(token: str) -> bytes:
        if fallback and (found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)):
            return bytes.fromhex(found[1])
        return token.replace(spaced, " ").encode()

    return sentencepiece


def _steps(decoder: Any) -> Iterator[dict[str, Any]]:
    if isinstance(decoder, dict) and "type" in decoder:
        yield decoder
        for step in decoder.get("decoders", []):
            yield from _steps(step)


def byte_level(token: str) -> bytes:
    """Convert a token in GPT-2's alphabet, in which every byte is a printable character, to bytes."""
    alphabet = byte_alphabet()
    return b"".join(bytes([alphabet[char]]) if char in alphabet else char.encode() for char in token)


@cache
def byte_alphabet() -> dict[str, int]:
    """Return the map from characters to bytes: printable bytes map to themselves, the others follow from U+0100 on (as
    in GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + n): byte for n, byte in enumerate(others)}}
