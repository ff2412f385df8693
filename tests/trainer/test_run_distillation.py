"""Whole runs of distillation: a student learns from a teacher of a usual run, resumes exactly, and loses nothing while
the teacher is down."""

import pytest
from runs import finish, rows_of, start
from test_run_algorithms import assert_exact

from tests.engines.chat_server import ChatServer, Reply, refusal

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distillation_runs")]

STUDENT = [
    "model.tiny.hidden_size=32",
    "model.tiny.intermediate_size=64",
    "model.warm_start.check_every=5",
    "algorithm.group_size=1",
    "trainer.prompts_per_step=8",
    "trainer.max_steps=4",
    "evaluation.rows=4",
    "evaluation.sampled_rows=0",
    "distillation.reward_weight=0",
]
"""A smaller policy, almost without a warm start, that learns from the teacher alone."""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The export of a usual run."""
    run_dir = tmp_path_factory.mktemp("teacher") / "run"
    finish(start(run_dir, "trainer.max_steps=1", "evaluation.before_train=false", "evaluation.rows=4"))
    return run_dir / "export"


def test_a_student_comes_closer_to_its_teacher_and_resumes_exactly(teacher, tmp_path):
    whole = assert_exact(tmp_path, *STUDENT, f"distillation.teacher.path={teacher}", "distillation.top_k=8")
    assert all(0 < row["train/top_k_mass"] < 1.001 for row in rows_of(whole) if row["step"])
    distances = [row["distillation/reverse_kl"] for row in rows_of(whole) if row["step"]]
    assert len(distances) == 4 and 0 < distances[-1] < distances[0]
    assert all(row["analysis/zero_adv_groups"] == 0 for row in rows_of(whole) if row["step"])


@pytest.mark.ci
def test_a_teacher_that_goes_down_ends_the_run_by_one_sentence_and_nothing_is_lost(teacher, tmp_path):
    """The last checkpoint is the one that is written because the teacher does not answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(teacher)
    is_up = True

    def answer(body, number):
        if not is_up and number > 1 + 8 * 2:  # the check at the start, and two steps of 8 conversations or more
            return refusal(503, "down")
        texts = [tokenizer.decode([token]) for token in body["prompt"]]
        logprobs = {"tokens": texts, "token_logprobs": [None, *[-1.0] * (len(texts) - 1)]}
        return Reply(body={"choices": [{"logprobs": logprobs}], "usage": {"prompt_tokens": len(texts)}})

    run_dir = tmp_path / "run"
    with ChatServer(answer, "/v1/completions") as server:
        words = [*STUDENT, f"distillation.teacher.url={server.url}", "distillation.teacher.model=m"]
        words += ["trainer.checkpoint.every_steps=0", "distillation.teacher.endpoint.retries=0"]
        is_up = False
        output = finish(start(run_dir, *words), expected=2)
        assert (
            "failed 1 times, the last time with HTTP 503 down; see that it runs" in output and "Traceback" not in output
        )
        saved = [path.name for path in (run_dir / "checkpoints").glob("step_*")]
        assert len(saved) == 1 and saved[0] in ("step_000001", "step_000002")
        is_up = True
        finish(start(run_dir, *words, "resume=latest"))
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[-1]["distillation/requests"] >= 4 * 8
    assert (run_dir / "spending" / "distillation.teacher.endpoint.json").exists()
