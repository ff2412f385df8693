"""Creation of the teacher of distillation: a model on every rank, or the client of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtrl.config.derived import distils
from mtrl.config.schema import Config
from mtrl.engines.endpoints.budget import Budget
from mtrl.engines.endpoints.chat_client import api_key, check_key
from mtrl.engines.endpoints.prompt_logprobs import PromptScorer
from mtrl.errors import UserError
from mtrl.models.tokenizer_difference import difference
from mtrl.trainer.data.distillation import Distillation, LocalTeacher, ServedTeacher
from mtrl.trainer.setup.loading import compute_dtype, load_beside, load_tokenizer, vocabulary
from mtrl.trainer.update.learner import Learners

PATH, URL = "distillation.teacher.path", "distillation.teacher.url"


def check_teacher(config: Config) -> None:
    """Check that the tokenizer of a local teacher can be loaded, before a warm start takes minutes.

    Raises:
        UserError: it cannot be loaded.
    """
    path = config.distillation.teacher.path
    if path is not None and distils(config):
        load_tokenizer(config, path, PATH)


def teacher_model(config: Config, policy: Any, tokenizer: Any) -> Any:
    """Load the teacher of `distillation.teacher.path`, frozen, in the dtype of forward passes; None without one.

    Args:
        policy, tokenizer: module and tokenizer of the policy.

    Raises:
        UserError: the teacher cannot be loaded, cannot hold the policy's conversations, or has another tokenizer.
    """
    path = config.distillation.teacher.path
    if path is None or not distils(config):
        return None
    if (how := difference(load_tokenizer(config, path, PATH), tokenizer)) is not None:
        raise UserError(
            f"{PATH}={path} has another tokenizer than the policy ({how}); give a teacher with the policy's tokenizer"
        )
    teacher = load_beside(config, path, PATH, policy, compute_dtype(config))
    if (own := vocabulary(teacher)) < (wanted := vocabulary(policy)):
        raise UserError(
            f"{PATH}={path} has a vocabulary of {own} and the policy a larger one of {wanted}, so the policy could "
            "sample a token that the teacher does not have; give a teacher with the policy's tokenizer"
        )
    context, wanted = positions(teacher), config.generator.max_context_length or positions(policy)
    if context < wanted:
        raise UserError(
            f"{PATH}={path} holds {context} tokens and a conversation of the policy up to {wanted}; set "
            f"generator.max_context_length={context}"
        )
    return teacher.eval().requires_grad_(False)


def positions(model: Any) -> int:
    """Return the maximum number of tokens of a conversation with this model."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 4096


def served_teacher(config: Config, spending: Path | None = None) -> ServedTeacher | None:
    """Return the teacher at `distillation.teacher.url`; None without one.

    Args:
        spending: folder that stores the requests and their cost; None: they are not stored.

    Raises:
        UserError: the environment variable of the API key holds none.
    """
    teacher = config.distillation.teacher
    if teacher.url is None or not distils(config):
        return None
    endpoint, key = teacher.endpoint, "distillation.teacher.endpoint"
    check_key(endpoint, f"{key}.api_key_env")
    if endpoint.api_key_env and not api_key(endpoint):
        raise UserError(f"{key}.api_key_env={endpoint.api_key_env}: the environment variable is not set; export it")
    path = None if spending is None else spending / f"{key}.json"
    budget = Budget(key, endpoint.price, endpoint.budget, path)
    return ServedTeacher(PromptScorer.at(teacher.url, teacher.model or "", endpoint, budget))


def make_distillation(config: Config, learners: Learners, spending: Path) -> Distillation | None:
    """Return the distillation of a run; None without one.

    Args:
        spending: folder that stores the requests to a server and their cost.
    """
    if not distils(config):
        return None
    settings, max_tokens = config.distillation, config.trainer.max_tokens_per_microbatch
    teacher = served_teacher(config, spending) or LocalTeacher(learners, max_tokens)
    return Distillation(teacher, settings.weight, settings.reward_weight)
