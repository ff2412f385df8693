"""Leases of servers."""

from mtrl.sandbox.server_lease import lease


def test_a_lease_is_held_once_and_its_owner_is_that_of_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "one"))
    first = lease("http://127.0.0.1:1")
    other = lease("http://127.0.0.1:2")
    assert lease("http://127.0.0.1:1") is None and first.owner != other.owner
    first.release()
    first.release()
    second = lease("http://127.0.0.1:1")
    assert second.owner == first.owner
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "two"))
    elsewhere = lease("http://127.0.0.1:1")
    assert elsewhere.owner != first.owner
    for each in (second, other, elsewhere):
        each.release()
