"""The contents and labels of a row under each document policy, and the proportions of sources.

Tokens are numbered through each file from 1 on, so that a token shows its position, and 0 is padding.
"""

import itertools

import numpy as np
import pytest

from tests.token_files import mix_of, opened, write_file
from titanlite.config.schema import Config
from titanlite.data.mixture import PADDING, Data, check_labels
from titanlite.data.order import MIXTURE, drawn
from titanlite.data.samples import Arrays
from titanlite.ground.errors import UserError

_SEQ_LEN = 8
_SEEDS = range(2)
_POLICIES = ["pack", "best_fit", "truncate"]
_EVERY = [(policy, mask) for policy in _POLICIES for mask in (False, True)]


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(autouse=True)
def _dirty(monkeypatch):
    """Fills memory that is not cleared, as earlier batches would."""
    empty = np.empty

    def dirty(*about, **keys) -> np.ndarray:
        array = empty(*about, **keys)
        array.view(np.uint8)[...] = 0x55
        return array

    monkeypatch.setattr(np, "empty", dirty)


def _config(policy: str = "pack", mask: bool = False, seq_len: int = _SEQ_LEN) -> Config:
    training = {"seq_len": seq_len, "document_policy": policy, "document_mask": mask}
    return Config.model_validate({"training": training})


def _numbered(lengths: list[int], first: int = 1) -> list[list[int]]:
    """Documents of these lengths, with consecutive numbers as tokens."""
    ends = np.cumsum([first, *lengths])
    return [list(range(begin, end)) for begin, end in itertools.pairwise(ends)]


def _random_lengths(seed: int) -> list[int]:
    """Of documents, some of them empty and some longer than a row."""
    random = np.random.default_rng(seed)
    return [20, *random.choice([0, 1, 2, 3, 7, 8, 9, 10, 16, 17, 25], random.integers(5, 60)).tolist()]


def _random_flags(documents: list[list[int]], seed: int) -> list[list[bool]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 2, len(document)).astype(bool).tolist() for document in documents]


def _data(tmp_path, documents, policy="pack", mask=False, losses=None, name="a", seq_len=_SEQ_LEN) -> Data:
    return mix_of([opened(write_file(tmp_path / name, documents, losses=losses))], _config(policy, mask, seq_len))


def _read_all(data: Data, source: int = 0) -> Arrays:
    """An epoch of a source, in the order of its files."""
    count = data.sources[source].samples
    return data.read(np.full(count, source), np.arange(count))


def _counted(arrays: Arrays) -> np.ndarray:
    return np.ones(arrays.tokens.shape, bool) if arrays.counted is None else arrays.counted


# ----------------------------------------------------------------------------------------------------------------- pack


def test_packed_rows_share_one_token_and_cover_the_tokens(tmp_path):
    arrays = _read_all(_data(tmp_path, _numbered([100, 1, 30 * 8 - 100])))
    assert arrays.tokens.dtype == np.int64
    assert arrays.tokens.shape == (30, _SEQ_LEN + 1)
    assert arrays.tokens[:, :-1].ravel().tolist() == list(range(1, 241))
    assert arrays.tokens[:, 1:].ravel().tolist() == list(range(2, 242))
    assert arrays.counted is None and arrays.documents is None  # all of every row counts


@pytest.mark.parametrize(("policy", "tokens"), [("pack", 0), ("pack", 8), ("best_fit", 1), ("truncate", 0)])
def test_data_of_no_sample_is_refused_with_key_and_name(tmp_path, policy, tokens):
    with pytest.raises(UserError, match=f"training.seq_len = 8: training.sources: tests has {tokens} tokens, not one whole"):
        _data(tmp_path, _numbered([tokens]), policy)


@pytest.mark.parametrize(("policy", "mask"), _EVERY)
def test_a_source_is_refused_by_name_only_if_none_of_its_samples_has_a_label(tmp_path, policy, mask):
    """Sources with hardly any labels: many documents of no or one token, many zeros in the loss mask."""
    found = {True: 0, False: 0}
    for seed in range(24):
        random = np.random.default_rng(seed)
        rare = (0.0, 0.01, 0.05)[seed % 3 - 1]  # documents of several tokens, and ones in the loss mask
        lengths = np.where(random.random(100) < rare, random.integers(2, 20, 100), random.integers(0, 2, 100)).tolist()
        lengths += [20] if seed % 4 == 0 else [1] * 20
        documents = _numbered(lengths)
        flags = [[bool(random.random() < rare) for _ in document] for document in documents]
        try:
            data = _data(tmp_path, documents, policy, mask, flags if seed % 2 else None, name=f"{policy} {seed}")
        except UserError as error:  # no sample at all
            assert "not one whole sample" in str(error)
            continue
        labels = _counted(_read_all(data))[:, 1:].any()
        found[bool(labels)] += 1
        if labels:
            check_labels(data)
        else:
            with pytest.raises(UserError, match=r"training\.sources"):
                check_labels(data)
    assert min(found.values()) > 0, found


@pytest.mark.parametrize("seed", _SEEDS)
def test_packed_rows_with_a_mask_are_cut_where_documents_begin(tmp_path, seed):
    lengths = _random_lengths(seed)
    begins = set(itertools.accumulate(lengths[:-1], initial=1))  # an empty document begins where the next one does
    arrays = _read_all(_data(tmp_path, _numbered(lengths), mask=True))
    assert arrays.counted is not None and arrays.documents is not None
    assert arrays.tokens[:, :-1].ravel().tolist() == list(range(1, arrays.tokens[-1, -1]))
    for tokens, counted, documents in zip(arrays.tokens, arrays.counted, arrays.documents, strict=True):
        assert counted[1:].tolist() == [token not in begins for token in tokens[1:].tolist()]
        expected = list(itertools.accumulate((token in begins for token in tokens[1:-1].tolist()), initial=1))
        assert documents.tolist() == expected


# ------------------------------------------------------------------------------------------- documents that are kept apart


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("seed", _SEEDS)
def test_truncated_rows_are_the_beginnings_of_documents(tmp_path, seed, mask):
    documents = _numbered(_random_lengths(seed))
    arrays = _read_all(_data(tmp_path, documents, "truncate", mask))
    assert arrays.counted is not None and len(arrays.tokens) == len(documents)
    for row, document in enumerate(documents):
        kept = document[: _SEQ_LEN + 1]
        padding = _SEQ_LEN + 1 - len(kept)
        assert arrays.tokens[row].tolist() == kept + [0] * padding
        first = [not mask] * bool(kept)  # with a mask the first token is never a label
        assert arrays.counted[row].tolist() == first + [True] * len(kept[1:]) + [False] * padding
        if mask:
            assert arrays.documents is not None
            inside = min(len(kept), _SEQ_LEN)
            assert arrays.documents[row].tolist() == [1] * inside + [1 + bool(document)] * (_SEQ_LEN - inside)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("seed", _SEEDS)
@pytest.mark.parametrize("seq_len", [1, _SEQ_LEN, 30])
def test_best_fit_rows_are_whole_pieces_of_documents_and_then_padding(tmp_path, seq_len, seed, mask):
    documents = _numbered(_random_lengths(seed))
    arrays = _read_all(_data(tmp_path, documents, "best_fit", mask, seq_len=seq_len))
    assert arrays.counted is not None
    document_of = {token: number for number, document in enumerate(documents) for token in document}
    labels = []
    for row in range(len(arrays.tokens)):
        tokens = arrays.tokens[row].tolist()
        kept = [token for token in tokens if token]
        assert tokens == kept + [0] * (len(tokens) - len(kept))
        joined = [a + 1 == b and document_of[a] == document_of[b] for a, b in itertools.pairwise(kept)]
        first = [True, *(not joins for joins in joined)]  # of a piece
        labels += [token for token, is_first in zip(kept, first, strict=True) if not is_first]
        expected = [not (mask and is_first) for is_first in first]
        assert arrays.counted[row].tolist() == expected + [False] * (len(tokens) - len(kept))
        if mask:
            assert arrays.documents is not None
            pieces = list(itertools.accumulate(first))
            numbers = pieces + [pieces[-1] + 1] * (len(tokens) - len(kept))
            assert arrays.documents[row].tolist() == numbers[:seq_len]
    assert sorted(labels) == [token for document in documents for token in document[1:]]


# ------------------------------------------------------------------------------------------------------ under all policies


@pytest.mark.parametrize(("policy", "mask"), _EVERY)
def test_the_loss_mask_decides_which_labels_count(tmp_path, policy, mask):
    documents = _numbered(_random_lengths(0))
    flags = _random_flags(documents, 1)
    with_flags = _read_all(_data(tmp_path, documents, policy, mask, flags))
    without = _read_all(_data(tmp_path, documents, policy, mask, name="b"))
    flag_of = np.array([False, *itertools.chain(*flags)])
    assert np.array_equal(with_flags.tokens, without.tokens)
    assert np.array_equal(_counted(with_flags), _counted(without) & flag_of[with_flags.tokens])
    assert 0 < _counted(with_flags).sum() < _counted(without).sum()


@pytest.mark.parametrize(("policy", "mask"), _EVERY)
def test_a_sample_of_padding_is_a_row_without_labels(tmp_path, policy, mask):
    data = _data(tmp_path, _numbered([40, 40]), policy, mask)
    alone = data.read(np.zeros(1, int), np.array([1]))
    arrays = data.read(np.zeros(3, int), np.array([PADDING, 1, PADDING]))
    assert arrays.counted is not None
    assert not arrays.counted[[0, 2]].any() and not arrays.tokens[[0, 2]].any()
    assert np.array_equal(arrays.tokens[1], alone.tokens[0])
    assert np.array_equal(arrays.counted[1, 1:], _counted(alone)[0, 1:])
    if mask:
        assert arrays.documents is not None and alone.documents is not None
        assert np.array_equal(arrays.documents[1], alone.documents[0])


@pytest.mark.parametrize(("policy", "mask"), _EVERY)
def test_no_row_reaches_from_one_file_into_the_next(tmp_path, policy, mask):
    parts = [_numbered(lengths, 1000 * number + 1) for number, lengths in enumerate(([30, 5], [1], [7, 30], [20]))]
    together = mix_of(
        [opened([write_file(tmp_path / f"{number}", part) for number, part in enumerate(parts)])], _config(policy, mask)
    )
    arrays = _read_all(together)
    files = [set((tokens[tokens > 0] // 1000).tolist()) for tokens in arrays.tokens]
    assert all(len(numbers) == 1 for numbers in files)
    rows = [sum(numbers == {number} for numbers in files) for number in range(len(parts))]
    assert rows == [part.count for part in together.sources[0].rows]
    for number in (0, 2, 3):
        alone = _read_all(mix_of([opened(together.sources[0].rows[number].file, str(number))], _config(policy, mask)))
        assert rows[number] == len(alone.tokens)
        first = sum(rows[:number])
        assert np.array_equal(arrays.tokens[first : first + rows[number]], alone.tokens)


# ----------------------------------------------------------------------------------------------------------- foreign ids


def _with_id(tmp_path, wrong: int) -> Data:
    documents = _numbered([100])
    documents[0][44] = wrong
    kept = opened(write_file(tmp_path / "kept", _numbered([50])), "kept")
    file = write_file(tmp_path / "wrong", documents, 2**17)
    return mix_of([kept, opened(file, "wrong")], _config(), vocabulary=1000)


@pytest.mark.parametrize("wrong", [1000, 70_000, -1])
def test_an_id_outside_of_the_vocabulary_is_refused_when_it_is_read(tmp_path, wrong):
    data = _with_id(tmp_path, wrong)
    fine = data.read(np.array([1, 0, 1]), np.array([4, 1, 6]))
    assert fine.tokens.shape == (3, 9)
    with pytest.raises(UserError) as error:
        data.read(np.array([1, 0, 1]), np.array([4, 1, 5]))
    place = f"{tmp_path / 'wrong'}.bin, sample 5: holds the id {wrong}"
    assert f"{place}, and the model's vocabulary is 1000" in str(error.value)


# --------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("policy", ["truncate", "best_fit"])
def test_weights_are_of_tokens_and_not_of_samples(tmp_path, policy):
    random = np.random.default_rng(0)
    short = opened(write_file(tmp_path / "short", [[1] * n for n in random.integers(5, 9, 300)]), "short", weight=3)
    long = opened(write_file(tmp_path / "long", [[2] * 9] * 100), "long", weight=1)
    data = mix_of([short, long], _config(policy))
    assert data.waste(data.sources[0])[0] > 0.1  # otherwise samples would be an equally good measure
    tokens = data.read(*data.locate(np.arange(20_000), 0, data.timeline(1).segments[0])).tokens
    assert (tokens == 1).sum() / (tokens == 2).sum() == pytest.approx(3, rel=0.01)


@pytest.mark.parametrize("policy", _POLICIES)
def test_without_weights_every_source_is_read_once_in_the_same_time(tmp_path, policy):
    lengths = {"a": 300, "b": 30, "c": 10}
    sources = [opened(write_file(tmp_path / name, _numbered([12] * count)), name) for name, count in lengths.items()]
    data = mix_of(sources, _config(policy))
    counts = [mixed.samples for mixed in data.sources]
    draws = drawn(sum(counts), data.shares)
    assert all(abs(draw - count) <= 1 for draw, count in zip(draws, counts, strict=True))
    assert len(set(counts)) == 3


def test_a_source_has_a_millionth_of_the_samples_at_least_and_others_keep_their_shares(tmp_path):
    weights = {"all": 1.0, "a few": 2e-6, "next to none": 1e-7, "less": 1e-9}
    files = [opened(write_file(tmp_path / name, _numbered([90])), name, weight=weight) for name, weight in weights.items()]
    assert mix_of(files, _config()).shares == [MIXTURE - 6, 2, 1, 1]
    assert mix_of(files[:2], _config()).shares == [MIXTURE // 2 - 2, 1]
    assert (
        mix_of([file._replace(cfg=file.cfg.model_copy(update={"weight": 0.5})) for file in files], _config()).shares == [1] * 4
    )
