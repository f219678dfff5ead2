"""The lock: one owner at a time, takeover of what expired, on disk and in a bucket."""

import sys
import threading

import pytest

from auditor.errors import LockedError
from auditor.patrol.lease import Lease
from auditor.storage.local import LocalStore
from auditor.storage.roots import store_at
from auditor.storage.writer import FolderWriter
from tests import s3


@pytest.fixture(params=["local", "s3"])
def place(request, tmp_path, monkeypatch):
    """A store and a writer over the same place."""
    if request.param == "local":
        writer = FolderWriter(tmp_path)
        return LocalStore(tmp_path), writer
    s3.use(monkeypatch)
    from auditor.storage.object_writer import ObjectWriter

    store = store_at(f"s3://{s3.new_bucket()}/ledger")
    return store, ObjectWriter(store.place)


def lease(place, owner, **options):
    return Lease(*place, "patrol/locks/all", owner=owner, **options)


def test_one_owner_at_a_time(place):
    with lease(place, "first").held(), pytest.raises(LockedError, match="first holds the lock until"):
        lease(place, "second").acquire()
    with lease(place, "second").held():
        pass
    assert lease(place, "x").numbers() == []


def test_an_expired_lock_is_taken_over_and_its_owner_notices(place):
    old = lease(place, "old", now=lambda: 1000.0)
    old.acquire()
    new = lease(place, "new", now=lambda: 2000.0)
    new.acquire()
    assert new.number == 1
    assert new.numbers() == [1]
    old.renew()
    with pytest.raises(LockedError, match="took the lock over"):
        old.check()
    new.renew()
    new.check()


@pytest.mark.parametrize("skew", [-1000.0, 1000.0])
def test_a_clock_that_is_wrong_lets_in_one_after_the_other_and_never_two_at_once(place, skew):
    """Behind, its lock is taken over and it notices; ahead, others wait for it."""
    owner = lease(place, "owner", now=lambda: 5000.0 + skew)
    owner.acquire()
    if skew < 0:
        lease(place, "other", now=lambda: 5000.0).acquire()
        owner.renew()
        with pytest.raises(LockedError, match="took the lock over"):
            owner.check()
        return
    with pytest.raises(LockedError, match="owner holds the lock until"):
        lease(place, "other", now=lambda: 5000.0 + skew).acquire()
    lease(place, "other", now=lambda: 5000.0 + skew + 301).acquire()


def test_an_owner_that_slept_while_others_took_the_lock_and_gave_it_back_holds_it_again(place):
    """It was nobody's by then: what it remembers of runs is held against their listing in any case."""
    sleeper = lease(place, "sleeper", now=lambda: 0.0)
    sleeper.acquire()
    with lease(place, "other").held():
        pass
    sleeper.now = lambda: 4e9
    sleeper.renew()
    sleeper.check()
    with pytest.raises(LockedError, match="sleeper holds"):
        lease(place, "third").acquire()


def test_of_several_who_take_over_one_wins(place):
    lease(place, "dead", now=lambda: 0.0).acquire()
    results = []
    barrier = threading.Barrier(4)

    def attempt(number):
        mine = lease(place, f"owner {number}")
        barrier.wait()
        try:
            mine.acquire()
            results.append("won")
        except LockedError:
            results.append("refused")

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["refused"] * 3 + ["won"]


def test_processes_that_create_one_file_do_not_take_away_each_others_draft(tmp_path):
    """On disk; in a bucket a conditional put has no draft."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for number in range(60):
            results, barrier = [], threading.Barrier(4)

            def create(number=number, results=results, barrier=barrier):
                writer = FolderWriter(tmp_path)
                barrier.wait()
                results.append(writer.create(f"locks/{number}", b"owner"))

            threads = [threading.Thread(target=create) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(results) == [False, False, False, True]
    finally:
        sys.setswitchinterval(before)
    assert not [*tmp_path.rglob("*.partial")]


def test_one_who_slept_between_look_and_write_gives_way(place, monkeypatch):
    sleeper = lease(place, "sleeper")
    numbers, looks = sleeper.numbers, []

    def look():
        looks.append(1)
        if len(looks) > 1:
            return numbers()
        lease(place, "dead", now=lambda: 0.0).acquire()
        found = []
        lease(place, "other").acquire()
        return found

    monkeypatch.setattr(Lease, "numbers", lambda self: look() if self is sleeper else Lease_numbers(self))
    with pytest.raises(LockedError):
        sleeper.acquire()


Lease_numbers = Lease.numbers


def test_a_lock_that_cannot_be_understood_is_respected_while_it_is_young(place):
    store, writer = place
    writer.write("patrol/locks/all/000000003", b"{garbage")
    with pytest.raises(LockedError, match="another patrol"):
        lease(place, "me").acquire()
    modified = store.stat("patrol/locks/all/000000003").modified
    later = lease(place, "me", now=lambda: modified + 1000)
    later.acquire()
    assert later.number == 4


def test_it_is_renewed_while_it_is_held(place):
    with lease(place, "me", held_seconds=0.4).held() as held:
        _, first = held.read(held.number)
        for _ in range(50):
            threading.Event().wait(0.1)
            list(held.store.list("patrol/locks/all"))
            if held.read(held.number)[1] > first:
                break
        assert held.read(held.number)[1] > first
