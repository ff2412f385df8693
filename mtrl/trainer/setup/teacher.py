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
from mtrl.trainer.loading import compute_dtype, load_beside, load_tokenizer, vocabulary
from mtrl.trainer.setup.connect import check_context, context_limit
from mtrl.trainer.update.distillation import Distillation, LocalTeacher, ServedTeacher
from mtrl.trainer.update.learner import Learners

PATH, ENDPOINT = "distillation.teacher.path", "distillation.teacher.endpoint"


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
    if own < (top_k := config.distillation.top_k):
        raise UserError(f"distillation.top_k={top_k} is more than the {own} tokens that {PATH}={path} has; lower it")
    check_context(teacher.config, context_limit(config, policy.config), f"{PATH}={path}")
    return teacher.eval().requires_grad_(False)


def served_teacher(config: Config, tokenizer: Any) -> ServedTeacher | None:
    """Return the teacher at `distillation.teacher.url`, which answered and has this tokenizer; None without one.

    Raises:
        UserError: the environment variable of the API key holds none, the server does not answer as needed, or its
            tokenizer is another one.
    """
    teacher = config.distillation.teacher
    if teacher.url is None or not distils(config):
        return None
    endpoint = teacher.endpoint
    check_key(endpoint, f"{ENDPOINT}.api_key_env")
    if endpoint.api_key_env and not api_key(endpoint):
        raise UserError(
            f"{ENDPOINT}.api_key_env={endpoint.api_key_env}: the environment variable is not set; export it"
        )
    budget = Budget(ENDPOINT, endpoint.price, endpoint.budget)
    scorer = PromptScorer.at(teacher.url, teacher.model or "", endpoint, budget, config.distillation.top_k)
    served = ServedTeacher(scorer)
    served.check(tokenizer)
    return served


def make_distillation(
    config: Config, learners: Learners, served: ServedTeacher | None, spending: Path
) -> Distillation | None:
    """Return the distillation of a run; None without one.

    Args:
        served: the teacher if it is behind a server.
        spending: folder that stores the requests to a server and their cost.

    Raises:
        UserError: the earlier spending in the folder cannot be read.
    """
    if not distils(config):
        return None
    settings = config.distillation
    if served is not None:
        served.scorer.client.budget.store(spending / f"{ENDPOINT}.json")
    teacher = served or LocalTeacher(learners, settings.top_k, config.trainer.max_tokens_per_microbatch)
    return Distillation(teacher, settings.weight, settings.reward_weight)
