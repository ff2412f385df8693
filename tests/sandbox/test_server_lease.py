"""Leases of servers."""

from mtrl.sandbox.server_lease import lease


def test_a_lease_is_held_once_and_its_owner_is_that_of_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "one"))
    first = lease("http://127.0.0.1:1")
    other = lease("http://127.0.0.1:2")
    assert lease("http://127.0.0.1:1") is None and first.owner != other.owner
    assert not first.is_used and not other.is_used
    first.mark(is_used=True)
    first.release()
    first.release()
    second = lease("http://127.0.0.1:1")
    assert second.owner == first.owner and second.is_used and not other.is_used
    second.mark(is_used=False)
    assert not second.is_used
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "two"))
    elsewhere = lease("http://127.0.0.1:1")
    assert elsewhere.owner != first.owner and not elsewhere.is_used
    for each in (second, other, elsewhere):
        each.release()
