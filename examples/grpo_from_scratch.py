"""GRPO over turns on one page. No framework: torch, a tiny transformer with random weights, and a game.

    repeat
        run a group of G episodes for each prompt with the current policy                      (rollout)
        compare each episode with the other episodes of its group                              (advantages)
        make the sampled tokens of better episodes more likely, and of worse ones less         (loss)

The policy learns to find a number that the environment hides, using only the rewards of its turns:

    python examples/grpo_from_scratch.py
    python examples/grpo_from_scratch.py --credit turn --seed 1

Letters: M trajectories of a step (prompts x group size), L tokens of the longest one, V words of the vocabulary.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean, stdev

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

EPOCHS = 2
"""Number of updates on the trajectories of a step. From the second one, the policy differs from the one that
sampled."""
GAMES = 700
"""Number of games in the evaluations before and after training."""

# ----------------------------------------------------------------------------------------------------- environment

NUMBERS = ["1", "2", "3", "4", "5", "6", "7"]
VOCABULARY = ["<end>", "guess", "higher", "lower", "what?", *NUMBERS]
END = VOCABULARY.index("<end>")
MAX_TURNS = 4
MAX_TOKENS = 3
"""Maximum number of tokens of a turn. A good turn has two, a number and <end>, which the policy also has to learn."""


def encode(text: str) -> list[int]:
    return [VOCABULARY.index(word) for word in text.split()]


def decode(ids: list[int]) -> str:
    return " ".join(VOCABULARY[i] for i in ids if i != END)


@dataclass
class GuessTheNumber:
    """Find the secret number in four turns. Random guesses find it in 46 % of the games, bisection in all games."""

    secret: int
    turns: int = 0

    def reset(self) -> str:
        return "guess"

    def step(self, response: str) -> tuple[float, str, bool]:
        """Return the reward of the turn, the observation, and whether the episode is over."""
        self.turns += 1
        over = self.turns == MAX_TURNS
        if response not in NUMBERS:
            return -0.5, "what?", over
        if int(response) == self.secret:
            return 1.0, "", True
        return 0.0, "higher" if int(response) < self.secret else "lower", over


# --------------------------------------------------------------------------------------------------------- rollout


@dataclass
class Turn:
    """The observation, the action that the policy sampled, and its reward."""

    observation_ids: list[int]
    """Token ids of the observation. The policy did not sample them, so they are not trained on."""
    action_ids: list[int] = field(default_factory=list)
    """Exactly the sampled token ids. They are never encoded from the text again, which may give other ids."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of every action id when it was sampled, log pi_old."""
    reward: float = 0.0


Trajectory = list[Turn]


def token_ids(trajectory: Trajectory) -> list[int]:
    return [i for turn in trajectory for i in turn.observation_ids + turn.action_ids]


def rollout(model: Qwen3ForCausalLM, secrets: list[int]) -> list[Trajectory]:
    """Run one episode per secret, all in parallel, turn by turn."""
    environments = [GuessTheNumber(secret) for secret in secrets]
    trajectories = [[Turn(encode(environment.reset()))] for environment in environments]
    playing = list(zip(environments, trajectories, strict=True))
    while playing:
        speak(model, [trajectory for _, trajectory in playing])
        playing = [episode for episode in playing if answer(*episode)]
    return trajectories


@torch.no_grad()
def speak(model: Qwen3ForCausalLM, trajectories: list[Trajectory]) -> None:
    """Sample the action of every trajectory's last turn, token by token, until <end> or the token limit."""
    for _ in range(MAX_TOKENS):
        # Padding is after the last token, where a causal model cannot see it.
        contexts = [torch.tensor(token_ids(trajectory)) for trajectory in trajectories]
        last = [len(context) - 1 for context in contexts]
        logits = model(pad_sequence(contexts, batch_first=True)).logits[range(len(last)), last]
        logprobs = logits.log_softmax(-1)  # [M, V]
        ids = logprobs.exp().multinomial(1)  # [M, 1]
        for trajectory, token, logprob in zip(trajectories, ids, logprobs.gather(1, ids), strict=True):
            trajectory[-1].action_ids.append(int(token))
            trajectory[-1].logprobs.append(float(logprob))
        trajectories = [trajectory for trajectory in trajectories if trajectory[-1].action_ids[-1] != END]
        if not trajectories:
            break


def answer(environment: GuessTheNumber, trajectory: Trajectory) -> bool:
    """Let the environment answer the last turn. Return whether the episode continues with a new turn."""
    turn = trajectory[-1]
    turn.reward, observation, over = environment.step(decode(turn.action_ids))
    if not over:
        trajectory.append(Turn(encode(observation)))
    return not over


# ------------------------------------------------------------------------------------------------------ advantages


def trajectory_advantages(group: list[Trajectory]) -> list[list[float]]:
    """GRPO (arXiv 2402.03300): on all turns of trajectory i, A_i = (R_i - mean R) / (std R + 1e-6).

    R_i is the sum of the trajectory's rewards; mean and (unbiased) standard deviation are those of the group.
    """
    returns = [sum(turn.reward for turn in trajectory) for trajectory in group]
    mean, std = fmean(returns), stdev(returns)
    return [[(r - mean) / (std + 1e-6)] * len(trajectory) for r, trajectory in zip(returns, group, strict=True)]


def turn_advantages(group: list[Trajectory]) -> list[list[float]]:
    """Per-turn advantages: A_it = G_it - mean of the G_jt of the other trajectories j that reached turn t.

    G_it is the sum of trajectory i's rewards from turn t on: a turn gets no credit for earlier rewards. A turn that no
    other trajectory reached has no comparison, and gets 0.
    """
    to_go = [[sum(turn.reward for turn in trajectory[t:]) for t in range(len(trajectory))] for trajectory in group]

    def advantage(i: int, t: int) -> float:
        peers = [other[t] for j, other in enumerate(to_go) if j != i and t < len(other)]
        return to_go[i][t] - fmean(peers) if peers else 0.0

    return [[advantage(i, t) for t in range(len(trajectory))] for i, trajectory in enumerate(group)]


CREDIT = {"trajectory": trajectory_advantages, "turn": turn_advantages}

# ------------------------------------------------------------------------------------------------------------ loss


def token_rows(trajectory: Trajectory, advantages: list[float]) -> Iterator[tuple[float, ...]]:
    """Yield for each token its id, its mask (1: the policy sampled it), log pi_old, and the advantage of its turn."""
    for turn, advantage in zip(trajectory, advantages, strict=True):
        for i in turn.observation_ids:
            yield i, 0.0, 0.0, 0.0
        for i, logprob in zip(turn.action_ids, turn.logprobs, strict=True):
            yield i, 1.0, logprob, advantage


def collate(trajectories: list[Trajectory], advantages: list[list[float]]) -> Tensor:
    """Return the rows of all tokens, [M, L, 4], padded with zeros, so that padding has mask 0."""
    rows = [torch.tensor(list(token_rows(*pair))) for pair in zip(trajectories, advantages, strict=True)]
    return pad_sequence(rows, batch_first=True)


def ppo_loss(model: Qwen3ForCausalLM, batch: Tensor) -> Tensor:
    """PPO loss (arXiv 1707.06347): max(-A r, -A clip(r, 0.8, 1.2)), the mean over all sampled tokens of the step.

    r = pi / pi_old is the ratio of a token's current probability to that at sampling. Beyond the bounds the gradient is
    0, because the trajectories give no information about a policy far from the one that sampled them.
    """
    ids = batch[..., 0].long()
    mask, old_logprobs, advantages = batch[:, 1:, 1:].unbind(-1)  # [M, L-1]: the first token is never sampled
    logits = model(ids[:, :-1]).logits  # [M, L-1, V]: position i predicts token i+1
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    ratio = (logprobs - old_logprobs).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    return (mask * loss).sum() / mask.sum()


def update(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, batch: Tensor) -> tuple[float, float]:
    """Take one optimizer step. Return the loss, and the norm of its gradient before clipping to 1."""
    if not batch[..., 3].any():
        return 0.0, 0.0  # no signal, but Adam would still step by its momentum
    optimizer.zero_grad()
    loss = ppo_loss(model, batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), norm.item()


# ------------------------------------------------------------------------------------------------------------ main


def make_model(seed: int) -> Qwen3ForCausalLM:
    """Create a Qwen3 model with 83 thousand random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config).eval()


def make_optimizer(model: Qwen3ForCausalLM, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


def train(model: Qwen3ForCausalLM, args: argparse.Namespace) -> None:
    optimizer = make_optimizer(model, args.lr)
    print(" step   reward  success  turns  idle groups      loss   |grad|")
    for step in range(args.steps):
        prompts = [1 + (step * args.prompts + p) % len(NUMBERS) for p in range(args.prompts)]
        trajectories = rollout(model, [secret for secret in prompts for _ in range(args.group_size)])
        groups = [trajectories[i : i + args.group_size] for i in range(0, len(trajectories), args.group_size)]
        advantages = [CREDIT[args.credit](group) for group in groups]
        batch = collate(trajectories, list(chain(*advantages)))
        for _ in range(EPOCHS):
            loss, norm = update(model, optimizer, batch)
        reward = fmean(sum(turn.reward for turn in trajectory) for trajectory in trajectories)
        turns = fmean(len(trajectory) for trajectory in trajectories)
        idle = sum(not any(chain(*group)) for group in advantages)
        print(f"{step + 1:5} {reward:8.3f} {success(trajectories):8.1%} {turns:6.2f} {idle:12} {loss:9.4f} {norm:8.3f}")


def success(trajectories: list[Trajectory]) -> float:
    """Return the share of episodes that found the number."""
    return fmean(trajectory[-1].reward == 1.0 for trajectory in trajectories)


def evaluate(model: Qwen3ForCausalLM) -> float:
    return success(rollout(model, [1 + game % len(NUMBERS) for game in range(GAMES)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=7, help="groups of a step")
    parser.add_argument("--group-size", type=int, default=32, help="episodes of a group, at least 2")
    parser.add_argument("--credit", choices=CREDIT, default="trajectory", help="what a turn answers for")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, least in {"steps": 1, "prompts": 1, "group_size": 2}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    torch.set_num_threads(1)  # more is slower for a model of this size
    model = make_model(args.seed)
    before = evaluate(model)
    train(model, args)
    print(f"\nsuccess {before:.1%} -> {evaluate(model):.1%} in {GAMES} games, {time.process_time():.0f} CPU-seconds\n")
    for secret, trajectory in enumerate(rollout(model, list(range(1, len(NUMBERS) + 1))), start=1):
        words = [word for turn in trajectory for word in (decode(turn.observation_ids), f"[{decode(turn.action_ids)}]")]
        print(f"secret {secret}:", *words)


if __name__ == "__main__":
    main()
