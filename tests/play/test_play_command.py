"""`mtrl play` as a program: its output, its input, and its errors."""

import os
import pty
import select
import subprocess
import sys
import time
from functools import partial

import pytest

from mtrl.types import StopReason, read_trajectories
from tests.play.shown import ROOT, TASK, flat

GOLDEN = """\
row 0 of train, id train-0: 5 turns at most ────────────────────────────────────
╭─ user ───────────────────────────────────────────────────────────────────────╮
│ say right 0                                                                  │
╰──────────────────────────────────────────────────────────────────────────────╯
╭─ assistant ──────────────────────────────────────────────────────────────────╮
│ look                                                                         │
╰──────────────────────────────────────────────────────────────────────────────╯
turn 1 of 5  reward +0.25
╭─ user ───────────────────────────────────────────────────────────────────────╮
│ heard 4 characters, 0 line breaks                                            │
╰──────────────────────────────────────────────────────────────────────────────╯
╭─ assistant ──────────────────────────────────────────────────────────────────╮
│ right                                                                        │
╰──────────────────────────────────────────────────────────────────────────────╯
turn 2 of 5  reward +1.00  components: style 0.5  metrics: looks 2  done
done after 2 turns ─────────────────────────────────────────────────────────────
reward  +1.25  turns: +0.25, +1.00
score   1  by the scorer
────────────────────────────────────────────────────────────────────────────────
episodes: 1, mean reward 1.250, successes 1
"""


def test_output_without_a_terminal(awkward):
    done = awkward("look\nright\n", "episodes=1")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == GOLDEN


def test_the_perfect_player_is_shown_the_same(awkward):
    assert awkward("", "player=gold").stdout == GOLDEN


def test_the_reward_is_composed_as_in_training(awkward):
    shown = awkward("look\nright\n", "reward.components={style:1.0}", "reward.level=trajectory", "episodes=1").stdout
    assert "reward  +1.75  turns: +0.00, +1.75; the environment itself gave +1.25" in shown


def test_disagreement_of_reward_and_scorer_is_shown(awkward):
    shown = awkward("disagree\n", "episodes=1").stdout
    assert "reward and scorer disagree: the environment gave +1.00, and by the scorer" in shown
    assert "in disagreement 1" in shown


def test_the_claim_threshold_judges_the_reward(awkward):
    shown = awkward("right\n", "evaluation.claim_threshold=1.1", "episodes=1").stdout
    assert "the environment gave +1.00, and by the scorer the episode solves the row" in " ".join(shown.split())


def test_rows_go_on_until_the_input_ends(awkward):
    shown = awkward("right\nright\nlook\n").stdout
    assert [f"id train-{n}" in shown for n in range(3)] == [True] * 3
    assert shown.endswith("episodes: 2, mean reward 1.000, successes 2, left unfinished 1\n")


def test_rows_go_on_until_the_rows_end(awkward):
    shown = awkward("right\n" * 9, "split=test", "row=1").stdout
    assert shown.count("id test-") == 1 and "these were all rows of test" in shown


def test_a_split_without_rows(awkward):
    done = awkward("right\n", "split=test", family="UNTESTED")
    assert done.returncode == 2 and flat(done.stderr).startswith("split=test has no rows; check data.path")


def test_a_closed_input_is_an_empty_one(awkward):
    """Services start programs without a standard input, and Python's `sys.stdin` is then None."""
    shown = awkward(None, "player=gold")
    assert shown.returncode == 0 and "successes 1" in shown.stdout


def test_commands(awkward):
    typed = "/help\n/gold\n/row 7\n/row train-2\n/skip\n/nonsense\n/bin/ls\n/quit\nright\n"
    shown = awkward(typed, "row=train-1").stdout
    assert "/gold  show the responses" in shown and "gold 2" in shown
    assert "row=7 is no row of split=train; it has 3 rows" in shown
    assert shown.index("id train-1") < shown.index("id train-2") and "these were all rows" in shown
    assert "episodes: 0" in shown

    shown = awkward("/nonsense\n/bin/ls -l\n/quit\nright\n").stdout
    assert "/nonsense is no command" in shown
    assert "heard 10 characters" in shown, "a path is a response"
    assert shown.endswith("episodes: 0, left unfinished 1\n")


def test_several_lines_between_quotes(awkward):
    typed = 'one line; /quit\n\n"""\nselect 1\n\n/quit\n"""\n""""\n"""\n""""\n'
    shown = awkward(typed).stdout
    assert "heard 15 characters, 0 line breaks" in shown
    assert "heard 15 characters, 2 line breaks" in shown
    assert "heard 3 characters, 0 line breaks" in shown


def test_a_response_cut_by_the_end_of_input_is_not_sent(awkward):
    shown = awkward('"""\nright\n').stdout
    assert 'the input ended before the line of """' in shown and "episodes: 0" in shown


def test_an_environment_that_raises_ends_its_episode_only(awkward):
    shown = awkward("raise\nnan\nright\n").stdout
    assert "RuntimeError: no disk (awkward.py, line" in flat(shown)
    assert "it must be a finite number" in flat(shown)
    assert "successes 1, failed 2" in shown


def test_an_environment_that_hangs_is_left_behind(awkward):
    begun = time.monotonic()
    done = awkward("hang\nright\n", "environment.step_timeout=0.5", "episodes=2")
    assert time.monotonic() - begun < 30 and done.returncode == 0
    assert "environment.step_timeout=0.5 s" in flat(done.stdout) and "successes 1, failed 1" in done.stdout


def test_a_scorer_that_raises_fails_the_episode(awkward):
    shown = awkward("scorer\n" * 5, "episodes=1").stdout
    assert "ZeroDivisionError: no scorer today" in shown and "failed 1" in shown


def test_hostile_text_is_harmless(awkward):
    done = awkward(
        b"escape\n\xed\xa0\x80 \xff half\n" + b"x" * 1_000_000 + b"\nright\n", "episodes=1", "out=kept.jsonl"
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and r"\x1b[2J\x1b[31mred" in done.stdout
    assert "heard 1000000 characters" in done.stdout and "980,000 characters" in done.stdout
    assert len(done.stdout) < 60_000


def test_as_a_program_on_a_terminal_of_ascii(program, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = program(b"look \xc3\xbc\nright\n", *TASK, "environment.target=tests.play.awkward.FAMILY", "episodes=1")
    assert (done.returncode, done.stderr) == (0, "") and "score   1" in done.stdout


def test_as_a_program_that_is_wrong(program):
    done = program(b"", "+experiment=gsm8k", "row=none")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("row=none is no row of split=train") and done.stderr.count("\n") == 1


def test_the_episodes_are_saved(awkward, tmp_path):
    typed = "look\nright\nlook\nraise\nright\nlook\n"
    shown = awkward(typed, "out=kept.jsonl").stdout
    kept = list(read_trajectories(tmp_path / "kept.jsonl"))
    assert [t.task_id for t in kept] == ["train-0", "train-2"] and "trajectories written: 2" in shown
    first = kept[0]
    assert (first.stop_reason, first.score, first.rewards) == (StopReason.DONE, 1.0, [0.25, 1.0])
    assert first.turns[1].components == {"style": 0.5}
    assert [m["content"] for m in first.messages] == [
        "say right 0",
        "look",
        "heard 4 characters, 0 line breaks",
        "right",
    ]


def test_tools_are_shown_and_called(awkward):
    call = '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>'
    shown = flat(awkward(f"{call}\n<tool_call>oops</tool_call>\n12\n", "episodes=1", family="WITH_TOOLS").stdout)
    assert "Return the price of an item, in cents." in shown and '"enum": ["tea", "rye"]' in shown
    assert " tool 5 " in shown and "Error: the tool call is not valid JSON" in shown
    assert "score 1" in shown


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["row=9"], "row=9 is no row of split=train; it has 3 rows, 0 to 2, ids such as train-0"),
        (["split=dev"], "split=dev is not known; choose one of train, test"),
        (["player=golden"], "player=golden is not known; did you mean gold?"),
        (["player=demonstrator"], "player=demonstrator: the family awkward has none; it has player=me, player=gold"),
        (["episodes=some"], "episodes=some must be an integer of at least 1"),
        (["out=nowhere/x.jsonl"], "out=nowhere/x.jsonl cannot be written"),
        (["algorithm.group_sise=3"], "did you mean algorithm.group_size=3?"),
    ],
)
def test_errors_are_one_sentence(awkward, words, sentence):
    done = awkward("right\n", *words)
    assert done.returncode == 2 and done.stdout == ""
    assert sentence in done.stderr and done.stderr.count("\n") == 1


def test_a_task_of_agent_programs_cannot_be_run_by_hand(play, tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(f'{{"prompt": "{split}?", "answer": "yes"}}\n')
    agent = ["environment=agent", "generator.agent.command=[python]", "generator.local.deterministic=false"]
    done = play("right\n", *TASK[:1], *agent, f"data.path={tmp_path}")
    assert done.returncode == 2 and done.stdout == ""
    assert "environment.name=agent needs an agent program, and cannot be run by hand" in done.stderr


def test_gold_that_is_not_there(awkward):
    assert "the family goldless has no perfect player" in awkward("/gold\n", family="GOLDLESS").stdout


@pytest.mark.parametrize("experiment", ["gsm8k", "text_to_sql", "games"])
def test_the_shipped_tasks_are_solved_by_gold(play, experiment):
    done = play("", f"+experiment={experiment}", "player=gold", "episodes=3", "split=test")
    assert done.returncode == 0 and "successes 3" in done.stdout, done.stdout + done.stderr


def test_the_demonstrator_plays_the_same_every_time(play):
    shown = [play("", "player=demonstrator", "episodes=3").stdout for _ in range(2)]
    assert shown[0] == shown[1] and "episodes: 3" in shown[0]


def test_no_torch_is_imported(tmp_path):
    code = "import sys; from mtrl.play.__main__ import main; status = main(['player=gold']); "
    code += "assert status == 0 and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT, timeout=120)


@pytest.mark.parametrize(("key", "status"), [(b"\x04", 0), (b"\x03", 130)], ids=["ctrl-d", "ctrl-c"])
def test_in_a_terminal(tmp_path, key, status):
    """A terminal shows colours and a prompt, and both keys end the program with the summary."""
    words = [*TASK, "environment.target=tests.play.awkward.FAMILY"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "mtrl.play", *words],
        cwd=tmp_path,
        env=environment,
        preexec_fn=partial(os.login_tty, slave),
        pass_fds=[slave],
    )
    os.close(slave)
    unread = b""

    def read_until(text, seconds=60, again=b""):
        """What is shown up to `text`. CPython sees a Ctrl-C between prompt and waiting only at the next key: `again`"""
        nonlocal unread
        last = time.monotonic() + seconds
        while text not in unread:
            assert time.monotonic() < last, unread
            if select.select([master], [], [], 5)[0]:
                unread += os.read(master, 65536)
            elif again:
                os.write(master, again)
        shown, found, unread = unread.partition(text)
        return shown + found

    try:
        opening = read_until(b"> ")
        assert b"/help lists the commands" in opening and b"say right 0" in opening and b"\x1b[" in opening
        os.write(master, b"right\n")
        assert b"by the scorer" in read_until(b"say right 1")
        read_until(b"> ")
        os.write(master, key)
        assert b"episodes: 1" in read_until(b"successes 1", again=key)
        assert process.wait(timeout=30) == status
    finally:
        process.kill()
        os.close(master)
