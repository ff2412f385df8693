"""The console: golden plain output, width, hostile text, and terminals that are narrow, dumb or closed."""

import io
import os
import pty
import re
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from mtrl.config.schema import Config, EnvironmentConfig
from mtrl.console import progress
from mtrl.console.console import Console
from mtrl.console.episode_view import message_text
from mtrl.console.step_table import COLUMNS
from mtrl.trainer.run import run_facts
from mtrl.types import StopReason, Trajectory

GOLDEN = """\
mtrl ───────────────────────────────────────────────────────────────────────────
task  gsm8k
run   outputs/1


evaluation at step 0 ───────────────────────────────────────────────────────────
success 30.0% [23.0, 36.0]  sampled 20.0%  reward 0.250
╭─  best  reward +1.00  ───────────────────────────────────────────────────────╮
│ user      3 boxes of 4 marbles: how many?                                    │
│ assistant <calc>3*4</calc>                                             +0.10 │
│           format +0.10                                                       │
│ tool      12                                                                 │
│ assistant <answer>12</answer>                                          +0.90 │
│           correct +0.90                                                      │
╰─  score 1 · done · 2 turns · 4 tokens · task-17  ────────────────────────────╯
╭─  worst  reward -0.10  ──────────────────────────────────────────────────────╮
│ assistant no idea                                                      -0.10 │
│ error     ValueError: boom                                                   │
╰─  timeout · 1 turn · 2 tokens · task-3  ─────────────────────────────────────╯
   step   reward  success   pass@1  zero-adv   turns    tok/s     drift    time
      1    0.250    35.0%    20.0%         0   2.950    4,100   2.1e-05    1.2s
      2        –        –    20.0%         –       –        –         –       –
warning: careful

12 steps in 3m12s ──────────────────────────────────────────────────────────────
held out          before  after
success            30.0%  90.0%
success, sampled       –  80.0%
reward             0.200  0.800

curves   outputs/1/curves.png
metrics  outputs/1/metrics.jsonl

look at what the agent did:
  mtrl view outputs/1
"""


@pytest.fixture
def lost(turn):
    return Trajectory(
        "task-3", "g", 1, [turn("no idea", reward=-0.1)], StopReason.TIMEOUT, error="Traceback\nValueError: boom"
    )


@pytest.fixture
def whole_run(rows, episode, lost):
    """Print all kinds of lines of a console."""

    def act(console):
        console.banner({"task": "gsm8k", "run": "outputs/1"})
        console.log(0, rows[0])
        console.evaluation(rows[0], episode, lost)
        with console.progress("training", 2) as training:
            for step, metrics in ((1, rows[1]), (2, {"rollout/reward/mean": None})):
                with console.progress("rollouts") as rollouts:
                    rollouts.advance(16)
                console.log(step, metrics)
                training.advance()
        console.warning("careful")
        summary = {
            "success_before": 0.3, "success_after": 0.9, "success_sampled_after": 0.8,
            "reward_before": 0.2, "reward_after": 0.8, "steps": 12, "seconds": 192.3,
        }  # fmt: skip
        paths = {"curves": "outputs/1/curves.png", "metrics": "outputs/1/metrics.jsonl"}
        console.finish(summary, paths, {"look at what the agent did": "mtrl view outputs/1"})

    return act


def test_golden_plain_output(printed, whole_run):
    assert printed(whole_run) == GOLDEN


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_no_line_is_wider_than_the_terminal(printed, whole_run, width, turn):
    def act(console):
        whole_run(console)
        wide = turn("漢字" * 200 + "x" * 300, "word " * 200, -1234.5, {"a very long name " * 5: 1.0})
        console.evaluation({}, Trajectory("id" * 100, "g", 0, [wide] * 9))

    assert max(cell_len(line) for line in printed(act, width).splitlines()) <= width


def test_80_columns_fit_the_main_metrics_and_wider_terminals_show_more(printed, rows):
    narrow, wide = (printed(lambda console: console.step(rows[1]), width).splitlines() for width in (80, 140))
    assert narrow[0].split() == [column.title for column in COLUMNS[:9]]
    assert wide[0].split()[:9] == narrow[0].split() and "entropy" in wide[0]
    assert len({len(line) for line in narrow}) == 1 == len({len(line) for line in wide})


def test_titles_return_every_twenty_lines(printed):
    lines = printed(lambda console: [console.step({"step": step}) for step in range(45)]).splitlines()
    assert [number for number, line in enumerate(lines) if "reward" in line] == [0, 21, 42]


def test_numbers_that_do_not_fit_stay_in_their_column(printed):
    extremes = {"step": 1, "rollout/reward/mean": -123456.789, "perf/tokens_per_second": 1e12, "time/step": 4e5}
    odd = {"step": 2, "rollout/reward/mean": float("nan"), "rollout/turns/mean": float("inf"), "time/step": "soon"}
    lines = printed(lambda console: [console.step(extremes), console.step(odd)]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "-1e+05" in lines[1] and "1e+12" in lines[1] and "nan" in lines[2] and "inf" in lines[2]


def test_large_whole_numbers_keep_their_digits(printed):
    steps = [9999, 10_000, 10_499, 123_456, 1_234_567]
    rows = [{"step": step, "perf/tokens_per_second": 100.0 * step} for step in steps]
    lines = printed(lambda console: [console.step(row) for row in rows]).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["9,999", "10,000", "10,499", "123456", "1e+06"]
    assert [line.split()[6] for line in lines] == ["999,900", "1000000", "1049900", "12345600", "1e+08"]
    assert len({len(line) for line in lines}) == 1


def test_hostile_text_is_shown_not_obeyed(printed, turn):
    evil = "[bold red]x[/] [/nope] :smile: \x1b[2J\x1b]0;title\x07 \u202e \r gone [link=file:///]l[/link]"
    episode = Trajectory(evil, "g", 0, [turn(evil, evil, 0.5, {evil: 1.0}, role="[red]")], error=evil)

    def act(console):
        console.banner({evil: evil}, title=evil)
        console.evaluation({}, episode, decode=lambda _: evil)
        console.warning(evil)
        console.note(evil)
        console.finish({}, {evil: evil}, {evil: evil})

    text = printed(act, width=200)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "[bold red]x[/] [/nope] :smile: \\x1b[2J\\x1b]0;title\\x07 \\u202e \\r gone" in text


def test_paths_and_commands_are_never_broken(printed):
    path, command = "/long" * 40 + "/curves.png", "mtrl train " + "key=value " * 20 + "end"
    lines = printed(lambda console: console.finish({}, {"curves": path}, {"go on": command})).splitlines()
    assert f"curves  {path}" in lines and f"  {command}" in lines


def test_long_episode_shows_its_ends(printed, turn):
    turns = [turn(f"turn {number}", reward=0.1) for number in range(50)]
    text = printed(lambda console: console.evaluation({}, Trajectory("t", "g", 0, turns)))
    assert re.findall(r"turn (\d+) ", text) == ["0", "1", "2", "47", "48", "49"]
    assert re.search(r"… 44 turns … +\+4\.40", text)


def test_tool_calls_and_parts_are_text(printed, turn):
    one = turn("", "x")
    call = {"function": {"name": "look", "arguments": "{}"}}
    one.observation = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image"}, "bare", 7]},
    ]
    text = printed(lambda console: console.evaluation({}, Trajectory("t", "g", 0, [one])))
    assert '{"name": "look", "arguments": "{}"}' in text and "see" in text and "[image]" in text and "bare" in text
    assert "(empty)" in text


@pytest.mark.parametrize(("calls", "shown"), [(5, "5"), ({"a": 1}, '{"a": 1}'), ("look", "look")])
def test_tool_calls_of_another_form_are_shown(calls, shown):
    """A number ended the run at its first evaluation."""
    assert message_text({"role": "user", "content": "text", "tool_calls": calls}) == f"text\n{shown}"


def test_evaluation_of_nothing(printed):
    assert printed(lambda console: console.evaluation({"step": 3})).strip().startswith("evaluation at step 3 ─")


def test_the_same_episode_is_shown_once(printed, episode):
    text = printed(lambda console: console.evaluation({}, episode, episode))
    assert "best" in text and "worst" not in text


def test_pass_1_of_the_last_evaluation_stays(printed):
    def act(console):
        console.step({"step": 1})
        console.evaluation({"val/success/pass_k_1": 0.25})
        console.step({"step": 2})
        console.log(3, {"rollout/reward/mean": 1.0, "val/success/pass_k_1": 0.5})

    lines = [line.split() for line in printed(act).splitlines()]
    assert [line[3] for line in lines if line and line[0] in ("1", "2", "3")] == ["–", "25.0%", "50.0%"]


def test_silence_is_broken_now_and_then(printed, monkeypatch):
    now = iter(range(0, 1000, 8))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(now))))

    def act(console):
        with console.progress("warm start", 12) as bar:
            for _ in range(12):
                bar.advance()

    lines = printed(act).splitlines()
    assert 1 <= len(lines) < 6 and re.fullmatch(r"warm start: \d+/12 after \w+", lines[0])


def test_facts_of_a_config():
    facts = run_facts(Config(environment=EnvironmentConfig(name="gsm8k"), run_dir="outputs/1"))
    assert facts["task"] == "gsm8k, synthetic rows, at most 5 turns"
    assert facts["algorithm"] == "turn_rloo + ppo, 16 prompts × 8 trajectories, lr 1e-06, seed 0"


def test_facts_name_an_environment_of_the_user():
    config = Config(environment=EnvironmentConfig(name="gsm8k", target="vault.Vault"), run_dir="outputs/1")
    assert run_facts(config)["task"] == "vault.Vault, synthetic rows, at most 5 turns"


# -- terminals ---------------------------------------------------------------------------------------------------------


def in_terminal(act, monkeypatch, term="xterm-256color"):
    """Return the output of `act` to a real pseudo-terminal."""
    monkeypatch.setenv("TERM", term)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as file:
        console = Console(file, width=80)
        act(console)
        os.set_blocking(master, False)
        chunks = []
        file.flush()
        try:
            while chunk := os.read(master, 65536):
                chunks.append(chunk)
        except BlockingIOError:
            pass
    os.close(master)
    return b"".join(chunks).decode().replace("\r\n", "\n")


def test_terminal_gets_colours_and_bars_that_vanish(monkeypatch):
    def act(console):
        with console.progress("warm start", 4) as bar:
            bar.advance(2)
            console.refresh()
        console.step({"step": 1, "rollout/reward/mean": 0.5})

    text = in_terminal(act, monkeypatch)
    assert "warm start" in text and "2/4" in text and "\x1b[36m    0.500" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back


def test_a_total_that_was_too_small_grows(monkeypatch):
    def act(console):
        with console.progress("warm start", 4) as bar:
            bar.advance(6)
            assert (bar.done, bar.total) == (6, 6)
            console.refresh()

    assert "6/6" in in_terminal(act, monkeypatch)


def on_screen(output):
    """Return the lines that a terminal shows."""
    lines, at = [""], 0
    for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if part == "\n":
            at += 1
            lines += [""] * (at == len(lines))
        elif part == "\x1b[1A":
            at -= 1
        elif part == "\x1b[2K":
            lines[at] = ""
        elif part[0] not in "\r\x1b":
            lines[at] += part
    return [line for line in lines if line]


def test_bars_that_are_drawn_while_a_line_is_on_its_way_remove_no_line(monkeypatch):
    """Rich draws them in a thread. It then knew of another number of bars than the terminal had, so that lines above
    the bars vanished, or bars stayed."""

    @dataclass
    class Line:
        refresh: Callable[[], None]

        def __rich_console__(self, terminal, options):
            if terminal.is_terminal:
                drawing = Thread(target=self.refresh)
                drawing.start()
                drawing.join()
            yield "second"

    def act(console):
        with console.progress("train", 2):
            console.note("first")
            with console.progress("evaluation", 8):
                pass
            console.show(Line(console.refresh))
        console.note("last")

    assert on_screen(in_terminal(act, monkeypatch)) == ["first", "second", "last"]


def test_bars_go_away_when_the_work_fails(monkeypatch):
    def act(console):
        with pytest.raises(KeyboardInterrupt), console.progress("a", 2), console.progress("b", 2):
            raise KeyboardInterrupt

    text = in_terminal(act, monkeypatch)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back


def test_dumb_terminal_gets_no_bar(monkeypatch):
    def act(console):
        with console.progress("warm start", 4) as bar:
            bar.advance(4)

    assert in_terminal(act, monkeypatch, term="dumb") == ""


@pytest.mark.parametrize("coloured", [False, True])
def test_a_closed_pipe_does_not_end_the_run(coloured, monkeypatch):
    if coloured:
        monkeypatch.setenv("FORCE_COLOR", "1")
    reader, writer = os.pipe()
    mirrored = []
    file = os.fdopen(writer, "w", encoding="utf-8", buffering=1)
    console = Console(file, width=80, mirror=lambda line, level: mirrored.append(line))
    os.close(reader)
    console.warning("one")
    console.warning("two")
    assert mirrored == ["warning: one", "warning: two"]
    with pytest.raises(BrokenPipeError):
        file.close()


def test_the_headline_of_a_mixture_has_a_line_for_each_source(printed):
    rates = {"val/success/mean": 0.5, "val/words/success/mean": 0.25, "val/sql/success/mean": 0.75}
    more = {"val/sql/success/ci_low": 0.6, "val/sql/success/ci_high": 0.9, "val/sql/turns/mean": 3.0}
    lines = printed(lambda console: console.evaluation({**rates, **more})).splitlines()
    assert [line for line in lines if "success" in line] == [
        "success 50.0%",
        "words  success 25.0%",
        "sql  success 75.0% [60.0, 90.0]  turns 3",
    ]


def test_an_encoding_without_the_characters_does_not_end_the_run():
    raw = io.BytesIO()
    console = Console(io.TextIOWrapper(raw, encoding="ascii"), width=80)
    console.warning("漢字 – ok")
    console.step({"step": 1})
    assert b"warning: ?? ? ok" in raw.getvalue()
