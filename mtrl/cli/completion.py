"""Completion of the command `mtrl` in a shell: commands, configuration keys and their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from mtrl.cli.commands import COMMANDS, COMPLETE, SERVERS
from mtrl.errors import UserError

BASH = f"""\
_mtrl() {{
    local IFS=$'\\n'
    COMPREPLY=($(mtrl {COMPLETE} "${{COMP_LINE:0:COMP_POINT}}" 2>/dev/null))
    [[ ${{#COMPREPLY[@]}} -eq 1 && ${{COMPREPLY[0]}} != *[=.] ]] && COMPREPLY[0]+=' '
}}
complete -o nospace -o default -F _mtrl mtrl"""
ZSH = f"""\
_mtrl() {{
    local -a found
    found=("${{(@f)$(mtrl {COMPLETE} "$LBUFFER" 2>/dev/null)}}")
    compset -P '*='
    [[ $#found -eq 1 && $found[1] != *[=.] ]] && compadd -- $found || compadd -S '' -- $found
}}
compdef _mtrl mtrl"""
SCRIPTS = {"bash": BASH, "zsh": ZSH}
LOADING = {
    "bash": 'eval "$(mtrl completion bash)"',
    "zsh": 'eval "$(mtrl completion zsh)"',
}
"""Command that loads the script of each shell; the first line of the script shows it as a comment."""


def script(words: Sequence[str]) -> str:
    """Return the script for a shell.

    Raises:
        UserError: the shell is unknown.
    """
    shell = words[0] if words else ""
    if shell not in SCRIPTS:
        raise UserError(f"mtrl completion {shell} names no known shell; write one of {', '.join(SCRIPTS)}".strip())
    return f"# {LOADING[shell]}\n{SCRIPTS[shell]}"


def completions(line: str = "") -> list[str]:
    """Return what may replace the word that is begun at the end of a command line.

    After `=` only the part behind it is returned, because bash takes `=` as the end of a word. A key is completed
    section by section: `tr` to `trainer.`, `trainer.max_s` to `trainer.max_steps=`.
    """
    *before, begun = line.split(" ")
    before = [word for word in before if word]
    if len(before) <= 1:
        return _starting([*COMMANDS, "completion"], begun)
    if before[1] == "serve":
        return _starting(SERVERS, begun) if len(before) == 2 else []
    if before[1] == "completion":
        return _starting(SCRIPTS, begun)
    if before[1] not in COMMANDS or not COMMANDS[before[1]].takes_keys:
        return []
    key, equals, value = begun.rpartition("=")
    return _starting(_values(key), value) if equals else _keys(begun)


def _starting(words: Iterable[str], begun: str) -> list[str]:
    return [word for word in words if word.startswith(begun)]


def _keys(begun: str) -> list[str]:
    """Return the groups and keys one level below the section that is begun."""
    from mtrl.config.keys import all_keys

    depth = begun.count(".")
    found = [f"{group}=" for group in _groups()] if not depth else []
    for path, key in all_keys().items():
        if path.startswith(begun) and path.count(".") == depth:
            found.append(f"{path}." if key.is_section else f"{path}=")
    return sorted(set(_starting(found, begun)))


def _values(key: str) -> list[str]:
    """Return the words that a key takes; empty if it takes any text or number."""
    from mtrl.config.keys import all_keys, words

    if key in _groups():
        return _groups()[key]
    found = all_keys().get(key)
    return [*words(key)] or (["true", "false"] if found and found.type is bool else [])


@cache
def _groups() -> dict[str, list[str]]:
    from mtrl.command.help import config_groups
    from mtrl.config.overrides import CONF

    return config_groups([CONF])
