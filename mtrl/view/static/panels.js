/* The curves that are shown by default, and the panel of any other metric. */

import * as format from "./format.js";
import * as visible from "./visible.js";

const line = (key, label, more) => ({ key, label, ...more });

/** {title, about, unit, log, share, zero, stacked, lines: [{key, label, low, high}]}; `prefix`: every key under it. */
export const PANELS = [
  { title: "Held-out success", unit: "share", share: true,
    about: "The scorer on held-out rows, with its interval, and the reward on the same rows",
    lines: [line("val/success/mean", "success", { low: "val/success/ci_low", high: "val/success/ci_high" }),
      line("val/reward/mean", "reward")] },
  { title: "Training reward and success",
    about: "Reward and the scorer's verdict on the training trajectories: they should rise together",
    lines: [line("rollout/reward/mean", "reward"), line("rollout/success/mean", "success")] },
  { title: "Reward against score", unit: "share", zero: true,
    about: "Where they disagree. Lenient: solved by the reward only; strict: solved by the scorer only",
    lines: [line("rollout/lenient_frac", "lenient"), line("rollout/strict_frac", "strict"),
      line("val/lenient_frac", "lenient, held out"), line("val/strict_frac", "strict, held out")] },
  { title: "Groups without advantage", unit: "share", share: true,
    about: "Groups whose trajectories have equal rewards: the policy learns nothing from them",
    lines: [line("analysis/zero_adv_frac", "share of groups")] },
  { title: "Spread of rewards", zero: true,
    about: "Standard deviation of the reward: over all trajectories, and within a group",
    lines: [line("rollout/reward/std", "over all"), line("analysis/group_reward_std", "within groups")] },
  { title: "Why episodes ended", unit: "share", stacked: true, prefix: "rollout/stop/",
    about: "Shares of the stop reasons in training" },
  { title: "Turns", unit: "turns", zero: true, about: "Turns per episode",
    lines: [line("rollout/turns/mean", "mean"), line("rollout/turns/p95", "95th percentile"),
    line("rollout/turns/max", "most")] },
  { title: "Tokens per turn", unit: "tokens", zero: true, about: "Sampled tokens of a turn",
    lines: [line("rollout/tokens/response_mean", "mean"), line("rollout/tokens/response_p95", "95th percentile"),
      line("rollout/tokens/response_max", "most")] },
  { title: "Tokens per conversation", unit: "tokens", zero: true,
    about: "Sampled tokens of an episode, and all tokens at its end",
    lines: [line("rollout/tokens/trajectory_mean", "sampled"), line("rollout/context/mean", "context, mean"),
      line("rollout/context/max", "context, most")] },
  { title: "Cut at a limit", unit: "share", zero: true,
    about: "Turns cut at the token limit, and episodes with such a turn",
    lines: [line("rollout/turns/cut_frac", "turns"), line("rollout/tokens/at_cap_frac", "episodes"),
      line("val/tokens/at_cap_frac", "episodes, held out")] },
  { title: "Entropy", unit: "nats", zero: true, about: "Mean entropy of the policy over the sampled tokens",
    lines: [line("train/entropy", "entropy")] },
  { title: "Drift", unit: "nats", log: true,
    about: "|trainer's − engine's log-prob| of the sampled tokens, before the update",
    lines: [line("analysis/logprob_drift/mean", "mean"), line("analysis/logprob_drift/max", "most")] },
  { title: "Gradient norm", log: true, about: "Norm of the gradient before it is clipped",
    lines: [line("train/grad_norm", "norm")] },
  { title: "Loss", about: "Loss of the policy", lines: [line("train/loss", "loss")] },
  { title: "Clipped", unit: "share", zero: true, about: "Tokens whose ratio was clipped",
    lines: [line("train/clip_frac", "clipped")] },
  { title: "KL to the reference", unit: "nats", zero: true, about: "Estimated KL divergence",
    lines: [line("train/kl", "KL")] },
  { title: "Time per step", unit: "s", zero: true, about: "Wall-clock time of a step and of its parts",
    // The hues are the colours of the timeline.
    lines: [line("time/step", "step", { hue: 6 }), line("time/generate", "generate", { hue: 0 }),
      line("time/update", "update", { hue: 2 }), line("time/evaluate", "evaluate", { hue: 4 })] },
  { title: "Sampled tokens per second", unit: "tokens/s", zero: true, about: "Tokens per second of generation",
    lines: [line("perf/tokens_per_second", "tokens/s")] },
  { title: "Memory", unit: "GiB", zero: true, factor: 2 ** -30,
    about: "Peak memory of the process or the device", lines: [line("perf/memory_bytes", "memory")] },
  { title: "Staleness", unit: "updates", zero: true,
    about: "Number of updates between sampling and training of a token",
    lines: [line("analysis/staleness/mean", "mean"), line("analysis/staleness/p95", "95th percentile"),
      line("analysis/staleness/max", "most")] },
];

/** Metrics that the panels need: keys, or prefixes with a star. */
export const KEYS = [...new Set(PANELS.flatMap((p) => (p.prefix ? [`${p.prefix}*`] : p.lines.flatMap((l) => [l.key,
  l.low, l.high])).filter(Boolean)))];

/** A panel for one metric that no panel above shows. */
export function single(key) {
  const seconds = key.startsWith("time/"), share = /_frac$|^rollout\/stop\//.test(key);
  return { id: key, title: visible.plain(key), about: key, unit: seconds ? "s" : share ? "share" : null, zero: seconds || share,
    log: /drift|mismatch\/(abs|k3|chi2)/.test(key), lines: [{ key, label: visible.plain(key) }] };
}

/** The lines of a panel; a prefix gives one line per existing key. */
export function linesOf(panel, keys) {
  if (!panel.prefix) return panel.lines;
  return keys.filter((key) => key.startsWith(panel.prefix)).map((key) => ({ key,
    label: format.words(key.slice(panel.prefix.length)) }));
}
