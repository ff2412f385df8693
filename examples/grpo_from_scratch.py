"""GRPO over turns on one page. No framework: torch, a tiny transformer with random weights, and a game.

    repeat
        play a group of G episodes for each prompt, with the policy as it is                   (rollout)
        compare the episodes of a group with each other: which did better than their peers?    (advantages)
        make the tokens that they sampled more likely, or less                                 (loss)

The policy learns to find a number that the environment hides, from nothing but the rewards of its turns:

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
"""Updates on the trajectories of a step. From the second on the policy is no longer the one that sampled."""
GAMES = 700
"""Of the evaluations before and after training."""

# ----------------------------------------------------------------------------------------------------- environment

NUMBERS = ["1", "2", "3", "4", "5", "6", "7"]
VOCABULARY = ["<end>", "guess", "higher", "lower", "what?", *NUMBERS]
END = VOCABULARY.index("<end>")
MAX_TURNS = 4
MAX_TOKENS = 3
"""Of a turn. A good one takes two, a number and <end>; that, too, is learned."""


def encode(text: str) -> list[int]:
    return [VOCABULARY.index(word) for word in text.split()]


def decode(ids: list[int]) -> str:
    return " ".join(VOCABULARY[i] for i in ids if i != END)


@dataclass
class GuessTheNumber:
    """Find the secret number in four turns. Blind guesses find it in 46 % of the games, halving the range in all."""

    secret: int
    turns: int = 0

    def reset(self) -> str:
        return "guess"

    def step(self, said: str) -> tuple[float, str, bool]:
        """What the turn is paid, what the environment answers, and whether the episode is over."""
        self.turns += 1
        over = self.turns == MAX_TURNS
        if said not in NUMBERS:
            return -0.5, "what?", over
        if int(said) == self.secret:
            return 1.0, "", True
        return 0.0, "higher" if int(said) < self.secret else "lower", over


# --------------------------------------------------------------------------------------------------------- rollout


@dataclass
class Turn:
    """What the environment said, what the policy answered, and what that was paid."""

    observation_ids: list[int]
    """Context: the policy did not choose these tokens, so they are not trained on."""
    action_ids: list[int] = field(default_factory=list)
    """The very ids that were sampled. They are never made from the text again, which may give other ids."""
    logprobs: list[float] = field(default_factory=list)
    """Of every action id when it was sampled, log pi_old."""
    reward: float = 0.0


Trajectory = list[Turn]


def token_ids(trajectory: Trajectory) -> list[int]:
    return [i for turn in trajectory for i in turn.observation_ids + turn.action_ids]


def rollout(model: Qwen3ForCausalLM, secrets: list[int]) -> list[Trajectory]:
    """Play one episode per secret, all of them turn by turn."""
    environments = [GuessTheNumber(secret) for secret in secrets]
    trajectories = [[Turn(encode(environment.reset()))] for environment in environments]
    playing = list(zip(environments, trajectories, strict=True))
    while playing:
        speak(model, [trajectory for _, trajectory in playing])
        playing = [episode for episode in playing if answer(*episode)]
    return trajectories


@torch.no_grad()
def speak(model: Qwen3ForCausalLM, trajectories: list[Trajectory]) -> None:
    """Sample the action of every trajectory's last turn, token by token, until it ends itself or is cut."""
    for _ in range(MAX_TOKENS):
        # Padding comes after the last token, where a causal model cannot see it.
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
    """Let the environment answer the last turn; returns whether the episode goes on, with a turn to be spoken."""
    turn = trajectory[-1]
    turn.reward, observation, over = environment.step(decode(turn.action_ids))
    if not over:
        trajectory.append(Turn(encode(observation)))
    return not over


# ------------------------------------------------------------------------------------------------------ advantages


def trajectory_advantages(group: list[Trajectory]) -> list[list[float]]:
    """GRPO (arXiv 2402.03300): on all turns of trajectory i, A_i = (R_i - mean R) / (std R + 1e-6).

    R_i is the sum of its rewards; mean and (unbiased) standard deviation are those of the group.
    """
    returns = [sum(turn.reward for turn in trajectory) for trajectory in group]
    mean, std = fmean(returns), stdev(returns)
    return [[(r - mean) / (std + 1e-6)] * len(trajectory) for r, trajectory in zip(returns, group, strict=True)]


def turn_advantages(group: list[Trajectory]) -> list[list[float]]:
    """Turn by turn: A_it = G_it - mean of the G_jt of the other trajectories j that reached turn t.

    G_it is what trajectory i is paid from turn t on: a turn does not answer for what was paid before it. A turn that no
    other trajectory reached has nothing to be compared with, and gets 0.
    """
    to_go = [[sum(turn.reward for turn in trajectory[t:]) for t in range(len(trajectory))] for trajectory in group]

    def advantage(i: int, t: int) -> float:
        peers = [other[t] for j, other in enumerate(to_go) if j != i and t < len(other)]
        return to_go[i][t] - fmean(peers) if peers else 0.0

    return [[advantage(i, t) for t in range(len(trajectory))] for i, trajectory in enumerate(group)]


CREDIT = {"trajectory": trajectory_advantages, "turn": turn_advantages}

# ------------------------------------------------------------------------------------------------------------ loss


def token_rows(trajectory: Trajectory, advantages: list[float]) -> Iterator[tuple[float, ...]]:
    """For each token: its id, its mask (1: the policy sampled it), log pi_old, and the advantage of its turn."""
    for turn, advantage in zip(trajectory, advantages, strict=True):
        for i in turn.observation_ids:
            yield i, 0.0, 0.0, 0.0
        for i, logprob in zip(turn.action_ids, turn.logprobs, strict=True):
            yield i, 1.0, logprob, advantage


def collate(trajectories: list[Trajectory], advantages: list[list[float]]) -> Tensor:
    """[M, L, 4] the rows of all tokens, filled up with zeros: what is padding has mask 0."""
    rows = [torch.tensor(list(token_rows(*pair))) for pair in zip(trajectories, advantages, strict=True)]
    return pad_sequence(rows, batch_first=True)


def ppo_loss(model: Qwen3ForCausalLM, batch: Tensor) -> Tensor:
    """PPO (arXiv 1707.06347): max(-A r, -A clip(r, 0.8, 1.2)), the mean over all sampled tokens of the step.

    r = pi / pi_old is how much more likely a token is now than when it was sampled. Beyond the bounds the gradient is
    0: the trajectories say nothing about a policy that is far from the one that played them.
    """
    ids = batch[..., 0].long()
    mask, old_logprobs, advantages = batch[:, 1:, 1:].unbind(-1)  # [M, L-1]: the first token is never sampled
    logits = model(ids[:, :-1]).logits  # [M, L-1, V]: position i predicts token i+1
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    ratio = (logprobs - old_logprobs).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    return (mask * loss).sum() / mask.sum()


def update(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, batch: Tensor) -> tuple[float, float]:
    """Step down the loss; returns it, and the norm of its gradient before that is clipped to 1."""
    if not batch[..., 3].any():
        return 0.0, 0.0  # nothing to learn: left to itself, Adam would go on by its momentum
    optimizer.zero_grad()
    loss = ppo_loss(model, batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), norm.item()


# ------------------------------------------------------------------------------------------------------------ main


def make_model(seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 83 thousand random weights."""
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
        played = rollout(model, [secret for secret in prompts for _ in range(args.group_size)])
        groups = [played[i : i + args.group_size] for i in range(0, len(played), args.group_size)]
        advantages = [CREDIT[args.credit](group) for group in groups]
        batch = collate(played, list(chain(*advantages)))
        for _ in range(EPOCHS):
            loss, norm = update(model, optimizer, batch)
        reward = fmean(sum(turn.reward for turn in trajectory) for trajectory in played)
        turns = fmean(len(trajectory) for trajectory in played)
        idle = sum(not any(chain(*group)) for group in advantages)
        print(f"{step + 1:5} {reward:8.3f} {success(played):8.1%} {turns:6.2f} {idle:12} {loss:9.4f} {norm:8.3f}")


def success(trajectories: list[Trajectory]) -> float:
    """Share of the episodes that found the number."""
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
