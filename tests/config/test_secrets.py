"""A secret in the configuration is refused before it is printed or stored, and harmless values are accepted.

`tests/command/test_config_experiments.py` checks the files under conf/.
"""

import pytest

from mtrl.command.compose import compose, merge
from mtrl.command.secret_checks import check_secrets
from mtrl.config.keys import plain
from mtrl.config.overrides import normalise
from mtrl.config.secret_names import holds_secret, is_secret, names_secret, shows_secret, without_password
from mtrl.errors import UserError

VLLM = ["generator.backend=vllm", "model=hf", "model.path=a/b"]
LONG = "abcdefghij0123456789"
REFUSED = [
    (["tracker.mlflow.uri='http://u:hunter2@host'"], "tracker.mlflow.uri", "export the address as MLFLOW_TRACKING_URI"),
    (
        ["tracker.report_to=[mlflow]", "tracker.mlflow.uri='postgresql://u:hunter2@db/x'"],
        "tracker.mlflow.uri",
        "export the address as MLFLOW_TRACKING_URI",
    ),
    (["generator.agent.url='http://u:hunter2@host:80'"], "generator.agent.url", "export its token as MTRL_AGENT_KEY"),
    (["generator.agent.url='http://host:80/?api_key=hunter2'"], "generator.agent.url", "write the address alone"),
    ([*VLLM, "generator.vllm.urls=['http://u:hunter2@h:1']"], "generator.vllm.urls", "export their token as MTRL_ENG"),
    (["generator.sglang.urls=['http://u:hunter2@h:1']"], "generator.sglang.urls", "write the addresses alone"),
    (["generator.vllm.args={api-key: hunter2}"], "generator.vllm.args.api-key", "leave it out: a server"),
    (["generator.vllm.env={MY_KEY_1: hunter2}"], "generator.vllm.env.MY_KEY_1", "leave it out: a server"),
    (["generator.agent.command=[python,a.py,--api-key,hunter2]"], "generator.agent.command", "agent.pass_env"),
    (["generator.agent.command=[python,a.py,'--token=hunter2000']"], "generator.agent.command", "agent.pass_env"),
    (["generator.agent.command=[sh,-c,'API_KEY=hunter2 python a.py']"], "generator.agent.command", "agent.pass_env"),
    ([f"generator.agent.command=[python,a.py,sk-{LONG}]"], "generator.agent.command", "agent.pass_env"),
    (["generator.agent.env={JWT: hunter2}"], "generator.agent.env.JWT", "write generator.agent.pass_env=[JWT]"),
    (["evaluation.model='M@http://u:hunter2@h/v1'"], "evaluation.model", "export the key as OPENAI_API_KEY"),
    (["evaluation.endpoint.extra_body={api_key: hunter2}"], "evaluation.endpoint.extra_body.api_key", "export the key"),
    (["environment.config={store: {password: hunter2}}"], "environment.config.store.password", "let your code read"),
    (["algorithm.extra={a: [{token: hunter2000}]}"], "algorithm.extra.a.token", "let your code read that"),
    ([f"data.path='hf_{LONG}'"], "data.path", "export it as an environment variable"),
]


@pytest.mark.parametrize(("words", "path", "fix"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_secret_is_refused_with_the_place_for_it(words, path, fix):
    with pytest.raises(UserError) as caught:
        compose(words)
    said = str(caught.value)
    assert said.startswith(f"{path} looks like a secret, and config.yaml, run.log and the console would show it; ")
    assert fix in said
    assert "hunter2" not in said and LONG not in said, "the sentence must not show it either"


@pytest.mark.parametrize(
    "words",
    [
        ["environment.config={pad_token: '<pad>', eos_token: eos, max_new_tokens: 8, tokenizer: a/b, token: '<t>'}"],
        ["environment.config={answer_key: forty, secret_word: apple, keys: [a, b], api_key_env: MY_KEY, secret: x}"],
        ["reward.components={environment: 1.0, length_penalty: {weight: 1, max_tokens: 8, buffer_tokens: 4}}"],
        ["model=hf", "model.path=org/sk-learn-bert-base-2024-01-long-name"],
        ["data.path=/data/hf_datasets/tokens/ghp_rows.jsonl"],
        ["generator.agent.command=[python,a.py,--api-key,$KEY,--token-file,t.txt,--max-tokens,'8']"],
        ["generator.agent.command=[sh,-c,'curl -H \"Authorization: Bearer $KEY\" $OPENAI_BASE_URL']"],
        ["generator.agent.pass_env=[OPENAI_API_KEY]", "generator.agent.api_key_env=MY_KEY"],
        ["generator.agent.env={TOKENIZERS_PARALLELISM: 'false', MAX_TOKENS_PER_TURN: '8', KEY_FILE: /k.pem}"],
        ["evaluation.compare=['org/name@http://host:8000/v1']"],
        ["tracker.mlflow.uri='http://user@host:5000'"],
        ["generator.vllm.urls=['http://host:8000']", "generator.vllm.args={tokenizer-mode: auto}"],
    ],
    ids=lambda words: words[0][:60],
)
def test_values_that_only_resemble_secrets_are_accepted(words):
    check_secrets(plain(merge(normalise(words))))


@pytest.mark.parametrize(
    "name",
    [
        *("API_KEY", "API_KEY_2", "OPENAI_KEY_1", "PASSPHRASE", "JWT", "SESSION_COOKIE", "COOKIE", "PRIVATE_KEY_PEM"),
        *("PGPASSWORD", "MYSQL_PWD", "DATABASE_URL", "GH_PAT", "OPENAI_APIKEY", "SECRET_KEY_BASE", "HF_TOKEN"),
        *("DOCKER_AUTH_CONFIG", "MY_TOKEN_PROD", "DB_PASSWORD_OLD", "AWS_SECRET_ACCESS_KEY", "github_token"),
    ],
)
def test_variables_that_hold_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN_PATH", "SSL_KEY_FILE", "TOKENIZERS_PARALLELISM", "KEYBOARD", "HOME", "PATH", "TOKEN_TIMEOUT"),
        *("VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE", "PYTHONPATH", "API_KEY_ENV", "CUDA_VISIBLE_DEVICES", "AUTHOR"),
    ],
)
def test_variables_that_do_not(name):
    assert not is_secret(name)


@pytest.mark.parametrize(
    "text",
    [
        *(f"sk-{LONG}", f"sk-proj-{LONG}", f"ghp_{LONG}", f"github_pat_{LONG}", f"hf_{LONG}", "AKIA0123456789ABCDEF"),
        *(
            f"say {LONG} and eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmVk",
            "-----BEGIN RSA PRIVATE KEY-----",
            "xoxb-0123456789",
        ),
        *("ftp://me:x@host/a", "https://host/?a=1&access_token=x", "Authorization: Bearer abcdefgh"),
    ],
)
def test_texts_that_hold_secrets(text):
    assert holds_secret(text) and is_secret("ANY", text) and shows_secret(["curl", text])


def test_a_variable_in_place_of_the_value_is_no_secret():
    assert names_secret("api-key", "x") and not names_secret("api-key", "$KEY") and not names_secret("api-key", "")


def test_an_address_is_shown_without_its_password():
    assert without_password("http://u:p@h:1/x") == "http://u:***@h:1/x"
    assert without_password("sqlite:///u:p") == "sqlite:///u:p"
