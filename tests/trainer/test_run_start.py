"""A resumed run has the policy before training, and the tokenizer, with which its checkpoint's run began."""

import json
import os
import sys
from dataclasses import replace

import pytest
from safetensors.torch import save_file
from torch import ones
from transformers import AutoTokenizer

from mtrl.command.compose import compose
from mtrl.config.schema import Config
from mtrl.errors import UserError
from mtrl.models.tiny import train_tokenizer
from mtrl.models.weight_files import model_digest
from mtrl.trainer.run import train
from mtrl.trainer.setup.start import check_start, depends_on_start, tokenizer_of_run
from tests import forked
from tests.trainer.runs import NO_EVALUATION, ROOT, finish, rows_of, start

ADAPTERS = ["model.lora_rank=2", "model.tiny.vocabulary=330", "model.warm_start.demonstrations=64", *NO_EVALUATION]


def config_of(*words) -> Config:
    from omegaconf import OmegaConf

    return OmegaConf.to_object(compose([*words]))


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ([], None),
        (["model.lora_rank=4"], "the weights beneath the adapters"),
        (["algorithm.kl_loss_coef=0.1"], "the reference of the KL"),
        (["algorithm.kl_reward_coef=0.1", "algorithm.kl_reference=elsewhere"], None),
        (["experiment=tic_tac_toe", "environment.opponent=frozen"], "the frozen opponent"),
        (["experiment=tic_tac_toe", "environment.opponent=frozen", "environment.opponent_path=elsewhere"], None),
    ],
)
def test_another_start_is_refused_where_the_run_depends_on_it(words, needed):
    config = config_of(*words)
    found = depends_on_start(config)
    assert found is None if needed is None else found.startswith(needed)
    for before, now in (("a", "a"), ("", "b"), ("a", "")):
        check_start(config, "resume=latest", before, now)
    if needed is None:
        check_start(config, "resume=latest", "a", "b")
    else:
        with pytest.raises(
            UserError, match=f"^resume=latest: {needed}.* model.path=null now gives another warm start; "
        ):
            check_start(config, "resume=latest", "a", "b")


def test_the_digest_is_that_of_the_weights(tmp_path):
    def digest(name, tensors):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        return model_digest(str(tmp_path / name))

    assert digest("one", {"w": ones(3)}) == digest("same", {"w": ones(3)}) != digest("other", {"w": 2 * ones(3)})
    (tmp_path / "one" / "config.json").write_text("{}")
    assert model_digest(str(tmp_path / "one")) == model_digest(str(tmp_path / "same"))
    (tmp_path / "none").mkdir()
    assert model_digest(str(tmp_path / "none")) == ""


def test_a_resumed_run_has_its_own_tokenizer(tmp_path, chatml_tokenizer):
    def trained(text):
        return train_tokenizer([[{"role": "user", "content": text}]] * 9, 280, ())

    config, own, other = config_of(), trained("how many apples are there"), trained("two plus three is five, seven")
    config.resume = "latest"
    assert len(own) == len(other) == 280
    assert tokenizer_of_run(config, tmp_path, other) is other  # none is stored
    own.save_pretrained(tmp_path)
    equal = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_of_run(config, tmp_path, equal) is equal
    assert tokenizer_of_run(config, tmp_path, other).get_vocab() == own.get_vocab() != other.get_vocab()
    pretrained = replace(config, model=replace(config.model, name="hf"))
    assert tokenizer_of_run(pretrained, tmp_path, other) is other
    adapted = replace(config, model=replace(config.model, lora_rank=4))
    for settings, now in ((adapted, other), (config, chatml_tokenizer)):
        with pytest.raises(UserError, match=r"^resume=latest: the weights belong to the tokenizer in .*another one \("):
            tokenizer_of_run(settings, tmp_path, now)


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_with_adapters_resumes_on_the_weights_beneath_them_only(tmp_path):
    run = tmp_path / "run"
    finish(start(run, *ADAPTERS, "trainer.max_steps=2"))
    tokenizer = (run / "tokenizer" / "tokenizer.json").read_bytes()
    for change, sentence in (
        ("model.warm_start.batch_size=16", "resume=latest: the weights beneath the adapters would not be those with"),
        ("seed=1", "resume=latest: the weights belong to the tokenizer in"),
    ):
        said = finish(start(run, *ADAPTERS, "trainer.max_steps=3", "resume=latest", change), expected=2)
        assert sentence in said and "Traceback" not in said, said
        assert (run / "tokenizer" / "tokenizer.json").read_bytes() == tokenizer and len(rows_of(run)) == 2
    states = [json.loads(path.read_text()) for path in sorted((run / "checkpoints").glob("step_*/state.json"))]
    assert len({state["start"] for state in states}) == 1 and len(states[0]["start"]) == 64
    # An evaluation of the checkpoint makes the warm start again if it is no longer in the cache.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MTRL_CACHE": str(tmp_path / "cache")}
    few = ["evaluation.rows=2", "evaluation.sampled_rows=0", "evaluation.output=report"]
    command = [sys.executable, "-m", "mtrl.evaluate", "run/checkpoints/step_000002", *few]
    done = forked.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "cache" / "warm_start").iterdir()) and (tmp_path / "report" / "report.html").is_file()


def test_a_missing_gpu_is_an_error_before_the_rows_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("mtrl.trainer.run.load_task", None)
    with pytest.raises(UserError, match="model.device=cuda needs a GPU, and this machine has none"):
        train(compose(["experiment=gsm8k", "model.device=cuda", f"run_dir={tmp_path / 'run'}"]))
