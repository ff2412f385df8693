"""Resources of workers: the room in a cluster agrees with placing workers one after another, and sizes are exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.rollout.resources import WorkerResources, byte_count

AMOUNTS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])
NODES = st.lists(
    st.fixed_dictionaries({"CPU": st.integers(0, 8), "memory": st.integers(0, 8), "license": st.integers(0, 3)}),
    max_size=3,
)


def placed(wanted, nodes):
    """Return the number of workers that fit, by placing them one after another."""
    free, count = [dict(node) for node in nodes], 0
    for node in free:
        while all(node[name] >= amount for name, amount in wanted.items()):
            node.update({name: node[name] - amount for name, amount in wanted.items()})
            count += 1
    return count


@given(cpus=st.sampled_from([0.25, 1.0, 3.0]), memory=st.integers(0, 4), licenses=AMOUNTS, nodes=NODES)
def test_room_is_the_number_of_workers_that_can_be_placed(cpus, memory, licenses, nodes):
    resources = WorkerResources(cpus, memory=memory, custom={"license": licenses})
    assert resources.room(nodes) == placed({"CPU": cpus, "memory": memory, "license": licenses}, nodes)


@given(count=st.integers(1, 20), cpus=AMOUNTS, licenses=AMOUNTS)
def test_a_cluster_of_the_run_has_room_for_its_workers(count, cpus, licenses):
    resources = WorkerResources(cpus, custom={"license": licenses})
    own = resources.own_cluster(count)
    node = {"CPU": own["num_cpus"], **own["resources"]}
    assert all(isinstance(amount, int) for amount in node.values()) and resources.room([node]) >= count


def test_a_reservation_in_words():
    assert str(WorkerResources(1.5, 1, 3 * 2**29, {"license": 2})) == "1.5 CPUs, 1 GPUs, 1.5 GiB of memory, 2 license"
    assert str(WorkerResources(0)) == "nothing"


@pytest.mark.parametrize(
    ("text", "count"), [("2GiB", 2**31), ("1.5 GB", 1_500_000_000), ("512KiB", 2**19), ("3TB", 3 * 10**12)]
)
def test_a_size_is_a_number_of_bytes(text, count):
    assert byte_count(text) == count


@pytest.mark.parametrize("text", ["2", "2G", "-1GiB", "0GiB", "GiB", "2GiB ", "1e3MB", ""])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"is not a size; write a number above 0 and a unit \(KiB, KB,.*such as 2GiB"):
        byte_count(text)
