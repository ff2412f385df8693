"""Reading stored trajectories."""

import pytest

from mtrl.errors import UserError
from mtrl.figures.episodes import read_episodes
from mtrl.record.run import Run
from mtrl.types import StopReason, to_json
from tests.figures.made import trajectory, turn


@pytest.fixture
def read(make_run):
    def read(cap=100, settings=None, **files):
        return read_episodes(Run(make_run(trajectories=files, settings=settings)), cap)

    return read


def test_the_facts_of_an_episode_are_read(read):
    first = turn(
        tokens=2,
        seen=5,
        reward=0.25,
        components={"format": 0.25},
        metrics={"tool/add/calls": 2.0},
        advantages=[1.0, 2.0],
    )
    last = turn(tokens=4, seen=3, reward=0.75)
    (episode,) = read(train_step_000003=[trajectory([first, last], score=0.5, stop=StopReason.MAX_TURNS)]).read
    assert (episode.kind, episode.step, episode.stop) == ("train", 3, "max_turns")
    assert (episode.reward, episode.score, episode.context) == (1.0, 0.5, 14)
    assert episode.verdict == "lenient" and episode.claimed and not episode.succeeded
    assert [t.tokens for t in episode.turns] == [2, 4] and [t.advantage for t in episode.turns] == [1.5, None]
    assert episode.turns[0].metrics == {"add": 2.0} and episode.turns[0].components == {"format": 0.25}


def test_a_context_break_restarts_the_count(read):
    turns = [turn(seen=5, tokens=2), turn(seen=20, tokens=3, broken="template"), turn(seen=1, tokens=1)]
    (episode,) = read(train_step_000001=[trajectory(turns)]).read
    assert episode.context == 25


def test_thresholds_are_those_of_the_run(read):
    settings = {"evaluation.success_threshold": 0.5, "evaluation.claim_threshold": 2.0}
    (episode,) = read(settings=settings, train_step_000001=[trajectory([turn(reward=1.0)], score=0.6)]).read
    assert episode.verdict == "strict"


def test_calls_of_the_message_are_counted_where_the_environment_did_not(read):
    calls = [{"function": {"name": name}} for name in ("add", "look", "add")]
    message = {"role": "assistant", "content": "", "tool_calls": [*calls, {}]}
    turns = [turn(message=message), turn(message=message, metrics={"tool/add/calls": 1.0, "malformed": 0.0})]
    (episode,) = read(train_step_000001=[trajectory(turns)]).read
    assert episode.turns[0].metrics == {"add": 2.0, "look": 1.0, "?": 1.0}
    assert episode.turns[1].metrics == {"add": 1.0, "malformed": 0.0}


def test_kinds_and_steps_come_from_the_names_and_chosen_files_do_not_count(read):
    one = [trajectory([turn()])]
    found = read(train_step_000001=one, eval_greedy_step_000000=one, disagree_step_000002=one, notes=one)
    assert [(e.kind, e.step) for e in found.read] == [("eval_greedy", 0), ("train", 1)]
    assert found.stored == 2 and found.note == "" and len(found.of("train")) == 1


def test_beyond_the_cap_the_same_sample_is_read_every_time(make_run):
    many = [trajectory([turn(reward=float(n))]) for n in range(60)]
    run = Run(make_run(trajectories={"train_step_000001": many[:20], "train_step_000002": many[20:]}))
    first, second = read_episodes(run, 30), read_episodes(run, 30)
    assert first == second
    assert len(first.read) == 30 == len({e.reward for e in first.read}) and first.stored == 60
    assert first.note == " 30 of 60 stored trajectories, a random sample."
    assert {e.step for e in first.read} == {1, 2}
    assert all((e.step == 1) == (e.reward < 20) for e in first.read)
    assert [e.reward for e in first.read] != [float(n) for n in range(30)]


def test_lines_outside_of_the_sample_are_not_parsed(make_run):
    folder = make_run(trajectories={"train_step_000001": [trajectory([turn()])]})
    with (folder / "trajectories" / "train_step_000001.jsonl").open("a") as file:
        file.write("no JSON\n" * 2000)
    parts = [read_episodes(Run(folder), 0)]
    assert parts[0].read == [] and parts[0].stored == 2001


def test_a_line_that_is_being_written_is_left_out(make_run):
    folder = make_run(trajectories={"train_step_000001": [trajectory([turn()])]})
    with (folder / "trajectories" / "train_step_000001.jsonl").open("a") as file:
        file.write('{"task_id": "x"')
    assert read_episodes(Run(folder)).stored == 1


@pytest.mark.parametrize("line", ["{}", "[1]", "not JSON", '{"turns": 3, "stop_reason": "done"}', ""])
def test_a_broken_line_is_one_sentence(make_run, line):
    good = trajectory([turn(metrics={"searches": 1.0})])
    folder = make_run(trajectories={"train_step_000001": [good]})
    with (folder / "trajectories" / "train_step_000001.jsonl").open("a") as file:
        file.write((line or to_json(good).replace('"searches": 1.0', '"searches": "many"')) + "\n")
    with pytest.raises(UserError, match="train_step_000001.jsonl:2 is no trajectory"):
        read_episodes(Run(folder))


def test_a_run_without_trajectories_has_none(make_run):
    assert read_episodes(Run(make_run())).read == []
