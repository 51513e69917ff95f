"""What a replica serves to the others: to those who know the secret, at one address."""

import socket
from collections.abc import Iterator
from contextlib import suppress
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from stages.diloco.arrays import seal
from stages.diloco.lighthouse import NONCE, PROOF, WHO, Objects, Secret, fetch, is_genuine, request_headers
from stages.errors import UsageError

OURS, THEIRS = Secret("the word of this training"), Secret("another word")
OFFER = seal({"round": 3}, b"weights")


@pytest.fixture
def objects() -> Iterator[Objects]:
    served = Objects("localhost", OURS)
    served.keep("offer/3", OFFER)
    yield served
    served.close()


def asked(objects: Objects, key: str, headers: dict[str, str]) -> tuple[int, bytes, str]:
    """Status, body and proof of the answer."""
    try:
        with urlopen(Request(f"{objects.address}/{key}", headers=headers), timeout=10) as answer:
            return answer.status, answer.read(), answer.headers[PROOF]
    except HTTPError as error:
        return error.code, error.read(), error.headers.get(PROOF, "")


def test_a_replica_gets_what_it_asks_for_and_knows_from_whom(objects: Objects) -> None:
    headers = request_headers(OURS, "0001-a", "offer/3")
    status, data, proof = asked(objects, "offer/3", headers)
    assert (status, data) == (200, OFFER) and objects.taken["offer/3"] == {"0001-a"}
    assert is_genuine(OURS, headers, "offer/3", proof, data)
    assert not is_genuine(OURS, headers, "offer/3", proof, seal({"round": 3}, b"other weights"))
    assert not is_genuine(OURS, request_headers(OURS, "0001-a", "offer/3"), "offer/3", proof, data), (
        "of another question"
    )
    status, data, proof = asked(objects, "mean/3", request_headers(OURS, "0001-a", "mean/3"))
    assert (status, data) == (404, b"") and proof


def test_who_cannot_prove_to_be_a_replica_is_none(objects: Objects) -> None:
    """A stranger at the lighthouse may name an address of its own, with other weights behind it."""
    stranger = Objects("localhost", THEIRS)
    stranger.keep("offer/3", OFFER)
    try:
        assert fetch(objects.address, "offer/3", OURS, "0001-a") == (OFFER, True)
        assert fetch(objects.address, "mean/3", OURS, "0001-a") == (None, True)
        assert fetch(stranger.address, "offer/3", OURS, "0001-a") == (None, False)
        assert fetch(objects.address, "offer/3", THEIRS, "0001-a") == (None, False)
        objects.keep("offer/4", OFFER[:-1])
        assert fetch(objects.address, "offer/4", OURS, "0001-a") == (None, False)
    finally:
        stranger.close()
    assert fetch(stranger.address, "offer/3", OURS, "0001-a") == (None, False)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {WHO: "0001-a"},
        {WHO: "0001-a", NONCE: "n", PROOF: "not even of one's own alphabet: \u00e9".encode().decode("latin-1")},
        request_headers(THEIRS, "0001-a", "offer/3"),
        request_headers(OURS, "0001-a", "state/3"),
        request_headers(OURS, "0001-a", "offer/3") | {WHO: "0002-b"},
    ],
    ids=["nothing", "a name", "a guess", "another secret", "for another object", "as another"],
)
def test_others_get_nothing(objects: Objects, headers: dict[str, str]) -> None:
    status, data, proof = asked(objects, "offer/3", headers)
    assert status == 403 and OFFER not in data and not proof
    assert objects.sent == 0 and not objects.taken["offer/3"]


def test_it_answers_at_one_address_alone(objects: Objects) -> None:
    """The machine has others, such as 127.0.0.2 on Linux."""
    assert objects.address.startswith("http://127.0.0.1:")
    with suppress(OSError), socket.create_connection(("127.0.0.2", int(objects.address.rpartition(":")[2])), timeout=2):
        pytest.fail("it answers at another address than the one that it names")


def test_the_secret_is_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPOSER_DILOCO_SECRET", raising=False)
    with pytest.raises(UsageError, match="COMPOSER_DILOCO_SECRET, which holds the secret"):
        Secret.read("COMPOSER_DILOCO_SECRET")
    monkeypatch.setenv("COMPOSER_DILOCO_SECRET", "the word of this training")
    assert Secret.read("COMPOSER_DILOCO_SECRET").proof("a") == OURS.proof("a") != THEIRS.proof("a")
