"""Calls over real processes, and the end of all ranks after the loss of one."""

import itertools
import re
import textwrap
import threading

import pytest
from rank_groups import play, run_ranks_of

from mtrl.distributed.rank_group import RankGroup
from mtrl.distributed.world import World
from mtrl.errors import UserError

LAST_WORDS = "; the job ends, resume=latest goes on from the last checkpoint"


def last_line(ended):
    """Return the last line of a rank, without the sentence that all ranks print."""
    assert ended.status == 1 and len(ended.err) == 1 and ended.err[0].endswith(LAST_WORDS), ended
    return re.sub(r" \(.*\)", "", ended.err[0].removesuffix(LAST_WORDS))


class Worker:
    def same(self, *args):
        return args

    def refuse(self):
        raise UserError("no")


def test_a_single_process_calls_the_worker_without_copies():
    rank_group, given = RankGroup(World(), Worker()), object()
    assert rank_group.run("same", [(given,)], given) == [(given, given)]
    assert rank_group.run("same", None, given)[0][0] is given
    with pytest.raises(UserError, match="no"):
        rank_group.run("refuse")
    assert rank_group.run("same") == [()]
    with pytest.raises(ValueError, match="1 ranks need a share each, and there are 2"):
        rank_group.run("same", [(), ()])
    rank_group.dismiss()


def test_concurrent_calls_run_one_after_another():
    running, most, calls = itertools.count(), [], threading.Barrier(4)

    class Slow:
        inside = 0

        def work(self):
            next(running)
            Slow.inside += 1
            most.append(Slow.inside)
            threading.Event().wait(0.01)
            Slow.inside -= 1

    rank_group = RankGroup(World(), Slow())
    threads = [threading.Thread(target=lambda: (calls.wait(), rank_group.run("work"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1] and next(running) == 4


def test_every_rank_executes_its_share_and_is_dismissed(tmp_path):
    """Calls are also made from another thread, with collectives of the workers, and after a `UserError`."""
    leader, follower, last = play(
        tmp_path,
        """
        print(rank_group.run("tell", [("a",), ("b",), ("c",)], "all"))
        print(rank_group.run("tell", None, 1, 2))
        for ranks in ([1, 2], [0], []):
            try:
                print(rank_group.run("refuse", None, ranks))
            except UserError as error:
                print(error)
        thread = threading.Thread(target=lambda: print(rank_group.run("total", [(1,), (2,), (3,)])))
        thread.start()
        thread.join()
        try:
            rank_group.run("tell", [("too few",)])
        except ValueError as error:
            print(error)
        print(rank_group.run("total", None, 1))
        """,
        size=3,
    )
    assert leader.out == [
        "[(0, 'a', 'all'), (1, 'b', 'all'), (2, 'c', 'all')]",
        "[(0, 1, 2), (1, 1, 2), (2, 1, 2)]",
        "rank 1 does not like it",
        "rank 0 does not like it",
        "['fine', 'fine', 'fine']",
        "[6.0, 6.0, 6.0]",
        "3 ranks need a share each, and there are 1",
        "[3.0, 3.0, 3.0]",
    ]
    assert [(rank.status, rank.err) for rank in (leader, follower, last)] == [(0, [])] * 3


def test_an_exception_on_a_follower_ends_all_ranks(tmp_path):
    """The other ranks wait in a collective; only the rank with the error prints a traceback."""
    leader, failed, other = play(tmp_path, 'rank_group.run("fail", None, 1)', size=3)
    assert last_line(leader) == "rank 0 of 3: rank 1 failed" and "(ZeroDivisionError: boom)" in leader.err[0]
    assert last_line(other) == "rank 2 of 3: rank 1 failed" and "(ZeroDivisionError: boom)" in other.err[0]
    assert failed.status == 1 and "Traceback" in failed.err[0]
    assert failed.err[-1] == f"rank 1 of 3: ZeroDivisionError: boom{LAST_WORDS}"


def test_an_exception_on_the_leader_ends_all_ranks(tmp_path):
    leader, follower = play(tmp_path, 'rank_group.run("fail", None, 0)')
    assert leader.status == 1 and "ZeroDivisionError: boom" in leader.err[-1]
    assert last_line(follower) == "rank 1 of 2: rank 0 failed"


def test_an_exception_between_calls_ends_all_ranks(tmp_path):
    """An invalid configuration, for example, ends the followers, and only the leader's error is printed."""
    leader, follower = play(tmp_path, "raise KeyError('x')")
    assert leader.status == 1 and leader.err[-1].endswith("KeyError: 'x'")
    assert (follower.status, follower.err) == (0, [])


def test_an_error_before_the_first_call_ends_all_ranks(tmp_path):
    """A follower cannot build its worker; `closing` notifies the other ranks."""
    program = """
    from contextlib import closing
    from mtrl.distributed.world import World
    with closing(World.join(30.0)) as world:
        if world.rank == 1:
            raise KeyError("model")
        world.gather(None)
    """
    leader, failed, other = run_ranks_of(tmp_path, textwrap.dedent(program), 3)
    assert last_line(leader) == "rank 0 of 3: rank 1 failed" and "(KeyError: 'model')" in leader.err[0]
    assert last_line(other) == "rank 2 of 3: rank 1 failed"
    assert failed.status == 1 and failed.err[-1].endswith("KeyError: 'model'")


def test_a_killed_follower_ends_all_ranks(tmp_path):
    leader, killed, other = play(tmp_path, 'rank_group.run("kill", None, 1)', size=3)
    assert killed.status == -9
    assert last_line(leader) == "rank 0 of 3: rank 1 is lost"
    assert last_line(other) == "rank 2 of 3: rank 1 is lost"


def test_a_killed_leader_ends_all_ranks(tmp_path):
    killed, *others = play(tmp_path, 'rank_group.run("kill", None, 0)', size=3)
    assert killed.status == -9
    assert [last_line(rank) for rank in others] == [f"rank {rank} of 3: the leader is lost" for rank in (1, 2)]


def test_a_follower_that_dies_during_rollouts_ends_the_leader_with_cleanup(tmp_path):
    """The leader is in its event loop and makes no call for a long time. Its open resources are closed."""
    leader, killed = play(
        tmp_path,
        """
        import asyncio
        async def rollouts():
            os.kill(rank_group.run("pid")[1], signal.SIGKILL)
            try:
                await asyncio.sleep(600)
            finally:
                print("closed")
        asyncio.run(rollouts())
        """,
    )
    assert killed.status == -9 and leader.out == ["closed"]
    assert last_line(leader) == "rank 0 of 2: rank 1 is lost"


def test_followers_wait_without_limit_while_the_leader_is_alive(tmp_path):
    leader, follower = play(tmp_path, "time.sleep(9); print(rank_group.run('total', None, 1))", timeout=4.0)
    assert (leader.status, leader.out, leader.err) == (0, ["[2.0, 2.0]"], [])
    assert (follower.status, follower.err) == (0, [])


def test_a_rank_that_exceeds_the_time_limit_ends_all_ranks(tmp_path):
    leader, slow = play(tmp_path, 'rank_group.run("sleep", None, 1, 600)', timeout=4.0)
    assert last_line(leader) == "rank 0 of 2: the other ranks took longer than trainer.fsdp.timeout"
    assert last_line(slow) == "rank 1 of 2: for rank 0, the other ranks took longer than trainer.fsdp.timeout"


def test_a_rank_that_hangs_ends_the_job(tmp_path):
    """No thread of the rank answers, as if its machine were lost."""
    leader, hung = play(
        tmp_path,
        """
        pid = rank_group.run("pid")[1]
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(600)
        finally:
            os.kill(pid, signal.SIGKILL)
        """,
        timeout=4.0,
    )
    assert hung.status == -9 and last_line(leader) == "rank 0 of 2: rank 1 is lost"


def test_followers_forward_signals_to_the_leader(tmp_path):
    """Schedulers signal every rank, often more than once. A signal that only a follower receives is forwarded."""
    leader, follower = play(
        tmp_path,
        """
        from mtrl.utils.signals import Interrupt
        with Interrupt() as interrupt:
            pid, end = rank_group.run("pid")[1], time.monotonic() + 30
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGUSR1)
            while not interrupt.requested and time.monotonic() < end:
                time.sleep(0.05)
            print(interrupt.requested)
            os.kill(os.getpid(), signal.SIGINT)
            print(rank_group.run("total", None, 1))
        """,
    )
    assert leader.out == ["SIGUSR1", "[2.0, 2.0]"]
    assert [(rank.status, rank.err) for rank in (leader, follower)] == [(0, [])] * 2
