"""Settings of on-policy distillation: a teacher scores the tokens that the policy sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

from mtrl.config.endpoint_schema import EndpointConfig
from mtrl.config.field import number


@dataclass
class TeacherConfig:
    """The model that scores the sampled tokens: a local model at `path`, or a server at `url`."""

    path: str | None = None
    """Model folder, Hub name or GGUF file with the policy's tokenizer; each rank loads it, or its shard of it."""
    url: str | None = None
    """Address of an OpenAI-compatible completions server, up to and including `/v1`. It must return the log-probs of a
    prompt of token ids (`echo=true` with `logprobs`), as vLLM and SGLang do, and serve the policy's tokenizer. With
    `distillation.top_k` it must take `prompt_logprobs`, as vLLM does."""
    model: str | None = None
    """Name of the model at `url`."""
    endpoint: EndpointConfig = field(default_factory=lambda: EndpointConfig(api_key_env=""))
    """Requests to `url`, with their time limit, prices and the budget of the whole run."""


@dataclass
class DistillationConfig:
    """On-policy distillation: the reverse KL to a teacher at each sampled token."""

    weight: float = number(1.0, at_least=0)
    """Weight of the reverse KL: of teacher minus policy log-prob in the advantage of a token, and of the sum over the
    `top_k` tokens in its loss; 0: no distillation."""
    top_k: int = number(0, at_least=0)
    """Number of the teacher's most probable tokens over which the reverse KL is summed at each sampled token. The
    advantage is that of sampled tokens outside of them; 0: of all sampled tokens."""
    reward_weight: float = number(1.0, at_least=0)
    """Weight of the advantages that come from rewards; 0: the teacher alone teaches, so that groups of equal reward and
    `algorithm.group_size=1` are trained too."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
