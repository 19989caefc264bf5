"""Users' loaders in one process: which microbatches, in which order, drawn by what; and what is wrong with them."""

import random
from itertools import islice

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases import loaders
from cases.loaders import Backwards, Lines, Numbers, Vectors
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from pipeplan.errors import BadInput, CodeFailed
from pipeplan.runtime.data.loader import Loader, data_from
from pipeplan.runtime.model.contract import Span


def read(made, span, batch=4):
    return [(x.microbatch, x.given) for x in Loader("m:f", made, batch).read(span)]


def flat(given):
    return torch.cat([torch.as_tensor(x).flatten().double() for x in given])


def test_what_is_called_for_a_microbatch_and_what_for_a_loader():
    class Callable:
        def __call__(self, index, seed):
            return index, seed

    for one in (lambda index, seed: 0, lambda index, seed=0: 0, lambda *all: 0, Callable(), lambda a, b, c: 0):
        assert data_from(one, "m:f", 4) is one
    for one in (lambda: 0, lambda batch: 0, lambda size: 0, lambda batch, workers=2: 0, Vectors, loaders.few):
        assert isinstance(data_from(one, "m:f", 4), Loader)


def test_an_epochs_order_is_that_of_the_loader_with_its_seed_and_the_epochs_number():
    """And after the epoch's length the rest, which makes no whole microbatch, is left out."""

    def made():
        return DataLoader(Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(7))

    found = read(made, Span(0, 0, 13))
    expected = []
    for epoch in range(3):
        plain = made()
        plain.dataset.set_epoch(epoch)
        plain.generator.manual_seed(7 + epoch)
        expected += [(5 * epoch + i, given) for i, given in enumerate(islice(plain, 5))]
    assert [(m, list(map(list, given))) for m, given in found] == [
        (m, [list(numbers), [m // 5] * 4]) for m, (numbers, _) in expected[:13]
    ]
    assert Loader("m:f", made, 4).batches == 5
    shorter = read(made, Span(0, 0, 8, epoch=4))
    assert [list(given[0]) for _, given in shorter[:4]] == [list(given[0]) for _, given in found[:4]]
    assert list(shorter[4][1][0]) == list(found[5][1][0])


@pytest.mark.parametrize(
    "made",
    [
        loaders.here, lambda batch: DataLoader(Vectors(), batch, sampler=Backwards(22)),
        lambda: DataLoader(Vectors(), batch_sampler=BatchSampler(RandomSampler(Vectors()), 4, drop_last=True)),
        lambda: DataLoader(Lines(), 4), lambda: Lines(sized=True),
        lambda: DataLoader(Vectors(20), None, sampler=Backwards(20)),
        lambda: TensorDataset(torch.rand(9, 16), torch.rand(9, 16)), Vectors,
    ],
)  # fmt: skip
def test_any_microbatch_is_the_same_from_anywhere_on_and_whatever_others_draw(made):
    one = Loader("m:f", made, 4)
    whole = list(one.read(Span(5, 0, 12)))
    assert [x.microbatch for x in whole] == list(range(12))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[2]
    for first, wants in ((0, lambda m: m % 3 == 1), (7, lambda m: True), (11, lambda m: True)):
        found = list(one.read(Span(5, first, 12, wants=wants)))
        assert [x.microbatch for x in found] == [m for m in range(first, 12) if wants(m)]
        for x in found:
            assert torch.equal(flat(x.given), flat(whole[x.microbatch].given))
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.random.get_state()[2] == states[2]
    if made is loaders.here:
        assert not torch.equal(flat(whole[0].given), flat(next(one.read(Span(6, 0, 1))).given))
        assert torch.equal(flat(one(0, 5)), flat(whole[0].given))


def test_microbatches_that_come_whole_are_read_again_and_again():
    batches = [(torch.full((4, 2), float(i)), torch.zeros(4)) for i in range(3)]

    class Own:
        def __iter__(self):
            return iter(batches)

    found = read(Own, Span(0, 2, 8))
    assert [(m, float(x[0, 0])) for m, (x, _) in found] == [(2, 2), (3, 0), (4, 1), (5, 2), (6, 0), (7, 1)]
    with pytest.raises(BadInput, match=r"^m:f: ended after 3 of 4 microbatches of 4 samples$"):
        read(Own, Span(0, 0, 8, epoch=4))


@pytest.mark.parametrize(
    ("made", "error", "words"),
    [
        (loaders.few, BadInput, "m:f: has fewer samples than the 4 of one microbatch"),
        (lambda: Lines(3), BadInput, "m:f: has not one microbatch of 4 samples"),
        (loaders.eight, BadInput, "m:f: its DataLoader has batches of 8 samples, the profile microbatches of 4; write"),
        (loaders.shared_out, BadInput, "m:f: its DistributedSampler gives each of 2 processes data of its own, but"),
        (loaders.a_pair, BadInput, r"m:f \(.*loaders.py:\d+\) gave a tuple; return a DataLoader, a Dataset"),
        (lambda: iter([1]), BadInput, r"m:f \(.*test_loader.py:\d+\) gave a list_iterator; return"),
        (lambda: 3, BadInput, r"m:f \(.*\) gave a int; return"),
        (
            lambda: DataLoader(loaders.Failing(), 4),
            CodeFailed,
            r"m:f: ValueError: sample 13 is torn .*\(.*loaders.py:\d+\)",
        ),
        (lambda batch: 1 / 0, CodeFailed, r"m:f: ZeroDivisionError: division by zero \(.*test_loader.py:\d+\)"),
    ],
)
def test_what_is_wrong_with_a_loader_is_said_in_one_sentence(made, error, words):
    with pytest.raises(error, match=words):
        read(made, Span(0, 0, 8))
