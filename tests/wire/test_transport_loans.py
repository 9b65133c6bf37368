"""Loans: what is lent is read where it lies, by who is meant to, or not at all."""

from __future__ import annotations

import gc
import hashlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from homing.errors import LoanGone
from homing.transport import MAX_LOAN_BYTES, MIN_LOAN_BYTES, Lender, borrow, may_lend
from homing.transport.loans import Loan

LONG = os.urandom(3 * MIN_LOAN_BYTES)


def lent(lender: Lender, data: bytes = LONG) -> Loan:
    loan = lender.lend(data)
    assert loan is not None
    return loan


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_another_process_reads_what_is_lent():
    loan = lent(Lender())
    program = (
        "import sys, hashlib; from homing.transport import borrow;"
        f"print(hashlib.sha256(borrow({loan.place}, {len(LONG)})).hexdigest())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert printed.stdout.strip() == hashlib.sha256(LONG).hexdigest()


@pytest.mark.parametrize("size", [0, 1, MIN_LOAN_BYTES - 1, MAX_LOAN_BYTES + 1])
def test_what_is_short_or_too_long_is_not_lent(size):
    assert Lender().lend(bytes(size)) is None


@pytest.mark.parametrize("size", [MIN_LOAN_BYTES, MIN_LOAN_BYTES + 4])
def test_what_is_as_long_as_the_least_loan_is_lent(size):
    loan = lent(Lender(), LONG[:size])
    assert borrow(loan.place, size) == LONG[:size]


def test_a_loan_ends_with_the_object_and_leaves_no_descriptor():
    lender = Lender()
    before = num_descriptors()
    loan = lent(lender)
    place = loan.place
    assert num_descriptors() == before + 1
    del loan
    gc.collect()
    assert num_descriptors() == before
    with pytest.raises(LoanGone):
        borrow(place, len(LONG))


def test_memory_that_was_returned_is_lent_again_and_who_comes_late_does_not_get_it():
    lender = Lender()
    first = lent(lender)
    first.returned()
    first.returned()
    other = LONG[::-1]
    second = lent(lender, other)
    assert second.place[:2] == first.place[:2]
    assert borrow(second.place, len(other)) == other
    with pytest.raises(LoanGone, match="something else"):
        borrow(first.place, len(LONG))
    third = lent(lender)
    assert third.place[1] != second.place[1]


def test_a_shorter_loan_in_longer_memory_ends_where_it_ends():
    lender = Lender()
    lent(lender).returned()
    short = lent(lender, LONG[: MIN_LOAN_BYTES + 8])
    assert borrow(short.place, MIN_LOAN_BYTES + 8) == LONG[: MIN_LOAN_BYTES + 8]


def test_memory_that_is_kept_for_the_next_loans_is_bounded():
    lender = Lender()
    before = num_descriptors()
    loans = [lent(lender, bytes(8 * 2**20)) for _ in range(6)]
    for loan in loans:
        loan.returned()
    loans.clear()
    assert num_descriptors() == before + 3  # a fourth and its number are more than 32 MiB


def test_files_that_are_kept_for_the_next_loans_are_bounded():
    lender = Lender()
    before = num_descriptors()
    loans = [lent(lender, LONG[:MIN_LOAN_BYTES]) for _ in range(100)]
    for loan in loans:
        loan.returned()
    loans.clear()
    assert num_descriptors() == before + 64


def test_nothing_is_lent_with_the_descriptors_that_connections_need():
    lender = Lender()
    _, hard = soft_and_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = num_descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * before + 8, hard))
    try:
        loans = [lender.lend(LONG) for _ in range(20)]
        assert loans[0] is not None
        assert loans[-1] is None
        assert num_descriptors() < before + 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, soft_and_hard)


def test_more_than_was_lent_is_not_there():
    loan = lent(Lender())
    with pytest.raises(LoanGone):
        borrow(loan.place, len(LONG) + 1)


def test_a_process_that_is_not_there_and_absurd_numbers_are_loans_gone():
    for place in [(2**31 - 2, 3, 1), (os.getpid(), 2**40, 1), (2**63 - 1,) * 3, (0, 0, 0)]:
        with pytest.raises(LoanGone):
            borrow(place, 100)


def test_what_is_no_loan_is_not_opened(tmp_path: Path):
    """Neither a pipe that would block, nor a file of the user's that a client may only name."""
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(8) + LONG)
    read_end, write_end = os.pipe()
    other = os.memfd_create("another program's")
    with secret.open("rb") as file:
        os.write(other, bytes(8) + LONG)
        for descriptor in (file.fileno(), read_end, write_end, other):
            with pytest.raises(LoanGone, match="nothing is lent"):
                borrow((os.getpid(), descriptor, 0), len(LONG))
    for descriptor in (read_end, write_end, other):
        os.close(descriptor)


def test_a_loan_that_is_being_written_is_not_read():
    """Its number is 0 meanwhile, and no loan has that one."""
    lender = Lender()
    loan = lent(lender)
    os.pwrite(loan.place[1], bytes(8), 0)
    with pytest.raises(LoanGone, match="something else"):
        borrow(loan.place, len(LONG))


@pytest.mark.parametrize(
    ("address", "lends"),
    [
        ("ipc:///tmp/x", True),
        ("tcp://127.0.0.1:5", True),
        ("tcp://localhost:5", True),
        ("tcp://[::1]:5", True),
        ("tcp://10.0.0.1:5", False),
        ("tcp://localhost.example:5", False),
    ],
)
def test_only_who_is_on_this_machine_is_lent_to(address, lends):
    assert may_lend(address) is lends
