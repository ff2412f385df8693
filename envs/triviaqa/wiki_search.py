"""The default tools file; `environment.config.tools_file` can name another."""

from __future__ import annotations

from envs.triviaqa.retriever import best_passage

NOTHING = "No relevant Wikipedia content found."


def wiki_search(query: str) -> str:
    """Search Wikipedia and read the article that fits best."""
    passage = best_passage(query)
    return passage.contents if passage else NOTHING


TOOL_FUNCTIONS = [wiki_search]
