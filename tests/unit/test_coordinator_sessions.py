"""Peers at the coordinator: joining, leaving, being lost, and what clients are told of it."""

from __future__ import annotations

import msgspec
import pytest

from homing.wire import (
    PROTOCOL_VERSION,
    Abort,
    Goodbye,
    Heartbeat,
    Hello,
    Lost,
    LostReason,
    ModelCard,
    RankInfo,
    Refused,
    Rejoin,
    Role,
    Welcome,
    pack,
    pack_payload,
    read_payload,
)
from homing.wire import Fleet as FleetMessage
from tests.support.coordinator_fleet import (
    CARD,
    INCARNATION,
    Failure,
    Fleet,
    client_hello,
    engine_hello,
    kinds,
    only,
    output,
    submit,
    to,
)


def ranks_told(message: object) -> list[tuple[int, bool]]:
    assert isinstance(message, FleetMessage | Welcome)
    return [(r.rank, r.live) for r in read_payload(message.ranks or b"", list[RankInfo])]


# Joining


def test_a_client_is_welcomed_with_what_there_is_to_know() -> None:
    fleet = Fleet()
    fleet.join_engine(0)
    welcome = only(fleet.say(b"c1", client_hello(1)))
    assert isinstance(welcome, Welcome)
    assert welcome.protocol_version == PROTOCOL_VERSION
    assert welcome.incarnation == INCARNATION
    assert (welcome.policy, welcome.reads_prefixes) == ("prefix_affinity", True)
    assert (welcome.live_ranks, welcome.heartbeat_s) == (1, 1.0)
    assert read_payload(welcome.model_card or b"", ModelCard) == CARD
    assert ranks_told(welcome) == [(0, True)]


def test_a_client_before_any_engine_gets_no_card_and_then_a_fleet_with_it() -> None:
    fleet = Fleet()
    welcome = only(fleet.say(b"c1", client_hello(1)))
    assert isinstance(welcome, Welcome)
    assert welcome.model_card is None
    assert ranks_told(welcome) == []
    [told] = to(b"c1", fleet.say(b"e0", engine_hello(100)))
    assert isinstance(told, FleetMessage)
    assert read_payload(told.model_card or b"", ModelCard) == CARD
    assert ranks_told(told) == [(0, True)]
    [told] = to(b"c1", fleet.say(b"e1", engine_hello(101)))
    assert isinstance(told, FleetMessage)
    assert told.model_card is None, "unchanged"
    assert (told.live_ranks, told.sequence) == (2, 2)


def test_engines_get_the_rank_they_want_or_the_lowest_free_one() -> None:
    fleet = Fleet()
    given = []
    for number, wanted in enumerate([None, 2, None, None, 7]):
        [welcome] = to(b"e%d" % number, fleet.say(b"e%d" % number, engine_hello(number, wanted)))
        assert isinstance(welcome, Welcome)
        given.append(welcome.rank)
    assert given == [0, 2, 1, 3, 7]


def test_a_new_process_takes_over_the_rank_of_a_live_engine_which_is_then_lost() -> None:
    """Its supervisor started it because the old one died, before anybody here noticed."""
    fleet = Fleet()
    fleet.join_client(1)
    fleet.join_engine(0)
    fleet.say(b"c1", submit())
    sent = fleet.say(b"e9", engine_hello(109, rank=0))
    assert [type(m).__name__ for m in to(b"e9", sent)] == ["Welcome"]
    assert isinstance(to(b"c1", sent)[0], Lost)
    assert fleet.loads == {0: 0}
    assert only(fleet.say(b"e0", Heartbeat(0))) == Rejoin(INCARNATION)


def test_a_process_that_comes_back_does_not_get_its_rank_from_its_successor() -> None:
    fleet = Fleet()
    fleet.join_engine(0)
    fleet.say(b"e9", engine_hello(109, rank=0))
    refused = only(fleet.say(b"e0", engine_hello(100, rank=0, incarnation=1)))
    assert isinstance(refused, Refused)
    assert "rank 0" in refused.reason
    assert fleet.loads == {0: 0}


def test_a_process_that_comes_back_to_its_free_rank_is_welcome() -> None:
    fleet = Fleet()
    fleet.join_engine(0)
    fleet.fail(b"e0")
    assert kinds(fleet.say(b"e0", engine_hello(100, rank=0, incarnation=1))) == [(b"e0", "Welcome")]


def test_a_uid_of_another_live_peer_is_refused() -> None:
    fleet = Fleet()
    fleet.join_client(1)
    assert isinstance(only(fleet.say(b"other", client_hello(1))), Refused)
    [refused] = to(b"e1", fleet.say(b"e1", engine_hello(1)))
    assert isinstance(refused, Refused)


def test_a_rank_beyond_the_limit_is_refused() -> None:
    assert isinstance(only(Fleet().say(b"e", engine_hello(1, rank=10**9))), Refused)


def test_clients_beyond_the_limit_are_refused() -> None:
    fleet = Fleet(max_clients=1)
    fleet.join_client(1)
    assert isinstance(only(fleet.say(b"c2", client_hello(2))), Refused)


def test_another_protocol_version_is_refused_by_name() -> None:
    fleet = Fleet()
    hello = Hello(PROTOCOL_VERSION + 1, Role.CLIENT, 1, 0)
    refused = only(fleet.say(b"c1", hello))
    assert isinstance(refused, Refused)
    assert str(PROTOCOL_VERSION + 1) in refused.reason
    assert "c1" not in fleet.coordinator.peers.by_identity


def test_another_protocol_version_is_refused_though_its_hello_has_another_shape() -> None:
    metadata = msgspec.msgpack.encode([Hello.TAG, PROTOCOL_VERSION + 1, "client", {"new": 1}])
    refused = only(Fleet().frames(b"c1", [metadata, b"x", b"y"]))
    assert isinstance(refused, Refused)


@pytest.mark.parametrize(
    "card",
    [
        None,
        b"\xffnoise",
        pack_payload(msgspec.structs.replace(CARD, block_size=0)),
    ],
)
def test_an_engine_without_a_proper_model_card_is_refused(card: bytes | None) -> None:
    assert isinstance(only(Fleet().say(b"e0", engine_hello(100, model_card=card))), Refused)


def test_an_engine_of_another_model_is_refused_while_the_first_is_served() -> None:
    fleet = Fleet()
    fleet.join_engine(0)
    other = pack_payload(msgspec.structs.replace(CARD, name="other"))
    refused = only(fleet.say(b"e1", engine_hello(101, model_card=other)))
    assert isinstance(refused, Refused)
    assert "other" in refused.reason
    fleet.fail(b"e0")
    assert kinds(fleet.say(b"e1", engine_hello(101, model_card=other))) == [(b"e1", "Welcome")]


def test_the_tokenizer_may_lie_elsewhere_on_each_host() -> None:
    fleet = Fleet()
    fleet.join_engine(0)
    moved = pack_payload(msgspec.structs.replace(CARD, tokenizer_dir="/elsewhere"))
    assert kinds(fleet.say(b"e1", engine_hello(101, model_card=moved))) == [(b"e1", "Welcome")]


# Strangers


def test_a_stranger_is_told_to_rejoin_once_an_interval() -> None:
    fleet = Fleet()
    assert fleet.say(b"s", submit()) == [(b"s", Rejoin(INCARNATION))]
    assert fleet.say(b"s", submit()) == []
    fleet.now += 1.0
    assert fleet.say(b"s", Heartbeat(3)) == [(b"s", Rejoin(INCARNATION))]


def test_a_stranger_that_says_goodbye_is_let_go() -> None:
    assert Fleet().say(b"s", Goodbye()) == []


def test_what_is_kept_of_strangers_is_bounded() -> None:
    fleet = Fleet()
    for number in range(5000):
        fleet.say(b"s%d" % number, Heartbeat(0))
        fleet.frames(b"g%d" % number, [b"\xff"])
    strangers = fleet.coordinator._strangers
    assert len(strangers._told_at) <= 1024
    assert len(strangers._warned) <= 1024


def test_messages_of_the_wrong_role_are_counted_and_dropped() -> None:
    fleet = Fleet()
    fleet.join_client(1)
    fleet.join_engine(0)
    assert fleet.say(b"e0", submit(client=100)) == []
    assert fleet.say(b"c1", output()) == []
    assert fleet.say(b"c1", Rejoin(1)) == []
    assert fleet.frames(b"c1", pack(Rejoin(1))) == []
    assert fleet.stats()["garbage"] == 4


# Being there


def test_every_peer_hears_from_the_coordinator_each_tick() -> None:
    fleet = Fleet()
    fleet.join_client(1)
    fleet.join_engine(0)
    beat = Heartbeat(INCARNATION)
    assert fleet.tick() == [(b"c1", beat), (b"e0", beat)]


def test_a_silent_engine_is_lost_after_the_timeout_and_its_clients_are_told() -> None:
    fleet = Fleet()
    fleet.join_client(1)
    fleet.join_engine(0)
    fleet.say(b"c1", submit())
    for _ in range(10):
        fleet.beat(b"c1")
        assert not any(isinstance(m, Lost) for _, m in fleet.tick())
    fleet.beat(b"c1")
    told = to(b"c1", fleet.tick())
    assert [m.reason for m in told if isinstance(m, Lost)] == [LostReason.RANK_LOST]
    assert [ranks_told(m) for m in told if isinstance(m, FleetMessage)] == [[(0, False)]]
    assert fleet.stats()["lost_ranks"] == 1


def test_a_silent_client_is_lost_and_its_requests_aborted() -> None:
    fleet = Fleet()
    fleet.join_client(1)
    fleet.join_engine(0)
    fleet.say(b"c1", submit())
    for _ in range(10):
        fleet.beat(b"e0")
        fleet.tick()
    fleet.beat(b"e0")
    assert Abort(1, 1, 0) in to(b"e0", fleet.tick())
    assert fleet.stats()["clients"] == 0


def test_garbage_is_a_sign_of_life_too() -> None:
    fleet = Fleet()
    fleet.join_engine(0)
    for _ in range(30):
        fleet.frames(b"e0", [b"\xff"])
        fleet.tick()
    assert fleet.loads == {0: 0}


def test_silence_while_the_coordinator_itself_stood_still_does_not_count() -> None:
    """It was stopped for a minute: what its peers said is still in the socket."""
    fleet = Fleet()
    fleet.join_engine(0)
    fleet.tick()
    fleet.tick(60.0)
    assert fleet.loads == {0: 0}
    for _ in range(10):
        fleet.tick()
    assert fleet.loads == {0: 0}
    fleet.tick()
    assert fleet.loads == {}


def test_a_peer_that_is_not_connected_is_lost_at_once() -> None:
    fleet = Fleet()
    fleet.join_client(1)
    fleet.join_engine(0)
    [told] = to(b"c1", fleet.fail(b"e0"))
    assert ranks_told(told) == [(0, False)]
    assert fleet.fail(b"e0") == []
    assert fleet.fail(b"never seen", Failure.FULL) == []


def test_a_goodbye_is_not_a_loss() -> None:
    fleet = Fleet()
    fleet.join_client(1)
    fleet.join_engine(0)
    fleet.say(b"c1", submit())
    sent = fleet.say(b"e0", Goodbye())
    assert [type(m).__name__ for m in to(b"c1", sent)] == ["Lost", "Fleet"]
    assert fleet.say(b"c1", Goodbye()) == []
    assert (fleet.stats()["lost_ranks"], fleet.stats()["lost_clients"]) == (0, 0)


def test_many_changes_in_one_event_are_told_once() -> None:
    """A takeover is a loss and a join."""
    fleet = Fleet()
    fleet.join_client(1)
    fleet.join_engine(0)
    sent = to(b"c1", fleet.say(b"e9", engine_hello(109, rank=0)))
    assert [type(m).__name__ for m in sent] == ["Fleet"]
    assert ranks_told(sent[0]) == [(0, True)]
