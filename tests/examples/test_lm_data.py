"""Texts, tokenizers and packed windows of the language model example, and refusals."""

import numpy as np
import pytest
from attention import PADDING
from config import ConfigError, DataConfig
from data import Share, heldout_batches, pack, training_batches, unigram_entropy
from documents import DataError, drop_repeats, load_documents, paragraphs, split
from tokens import Bytes, load_tokenizer
from train_tokenizer import Config as TokenizerConfig, main as train_tokenizer

TEXTS = {"a": "abcdefg", "b": "hijklmnopqrstu", "c": "vwxyz"}


def refusal(config: DataConfig) -> str:
    with pytest.raises(DataError) as caught:
        load_documents(config)
    return str(caught.value)


# Texts


def test_empty_files_are_refused(write):
    empty = write("empty.txt", b" \n")
    assert refusal(DataConfig(files=(empty,))) == (
        f"{empty}: every document there is empty."
    )


def test_text_in_another_encoding_is_refused_by_name(write):
    latin = write("latin.txt", b"caf\xe9 au lait")
    assert refusal(DataConfig(files=(latin,))) == (
        f"--data.files {latin}: not UTF-8 text (byte 0xe9 at offset 3). Convert it, or "
        "leave it out."
    )


def test_a_file_that_vanishes_is_named(write, monkeypatch):
    path = write("gone.txt", b"text")
    monkeypatch.setattr("documents.expand", lambda patterns: ["/no/gone.txt"])
    assert refusal(DataConfig(files=(path,))) == (
        "--data.files /no/gone.txt: cannot be read (No such file or directory)."
    )


def test_files_are_found_by_pattern_once_each(tmp_path, write):
    paths = [write(name, name.encode() * 10) for name in ("b.txt", "a.txt")]
    config = DataConfig(files=(str(tmp_path / "*.txt"), paths[0]))
    assert sorted(load_documents(config)) == sorted(paths)


def test_documents_that_others_quote_are_dropped():
    part = "A paragraph that is longer than forty characters."
    other = "Another paragraph, also longer than forty characters."
    documents = {"part": part, "whole": f"{part}\n\n{other}", "short": "x"}
    assert sorted(drop_repeats(documents)) == ["short", "whole"]


def test_a_tenth_is_held_out_and_hardly_any_of_it_was_seen():
    train, heldout = split(load_documents(DataConfig()))
    sizes = [len("".join(part.values()).encode()) for part in (train, heldout)]
    assert 0.08 < sizes[1] / sum(sizes) <= 0.1
    seen = {block for text in train.values() for block in paragraphs(text)}
    blocks = [block for text in heldout.values() for block in paragraphs(text)]
    repeated = sum(len(block) for block in blocks if block in seen)
    assert repeated < 0.01 * sum(map(len, blocks))


def test_one_document_loses_its_last_tenth():
    assert split({"only": "abcdefghij" * 10}) == (
        {"only": "abcdefghij" * 9},
        {"only": "abcdefghij"},
    )


def test_rows_of_a_hugging_face_data_set_are_documents(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"body": ["First one.", "", "Second one."], "id": [1, 2, 3]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")
    (tmp_path / "by_name").mkdir()
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "by_name/train.parquet")
    for name in ("saved", "by_name"):
        hf = str(tmp_path / name)
        found = load_documents(DataConfig(hf=hf, hf_column="body"))
        assert sorted(found.values()) == ["First one.", "Second one."]
    assert refusal(DataConfig(hf=hf)) == (
        f"--data.hf {hf}: no column 'text'; there are ['body', 'id']. Give one of them "
        "as --data.hf-column."
    )
    message = refusal(DataConfig(hf=hf, hf_split="test"))
    assert message.startswith(f"--data.hf {hf}: split 'test' cannot be loaded: ")


# Tokenizers


def test_bytes_come_back_as_they_went_in():
    tokens = Bytes().encode("naïve ☃")
    assert Bytes().end not in tokens
    assert Bytes().decode(np.append(tokens, Bytes().end)) == "naïve ☃"


def test_a_trained_tokenizer_brings_text_back(tmp_path, text, capsys):
    pytest.importorskip("tokenizers")
    path = str(tmp_path / "tokenizer.json")
    train_tokenizer(TokenizerConfig(path, size=300, data=DataConfig(files=(text,))))
    assert capsys.readouterr().out == f"300 tokens in {path}\n"
    tokenizer = load_tokenizer(DataConfig(tokenizer=path))
    tokens = tokenizer.encode("Line 7 is not line 49. ☃")
    assert tokenizer.decode(tokens) == "Line 7 is not line 49. ☃"
    assert len(tokens) < len("Line 7 is not line 49. ☃".encode())
    assert tokenizer.size == 300 and tokenizer.end not in tokens
    with pytest.raises(DataError) as caught:
        load_tokenizer(DataConfig(tokenizer=path, end="</s>"))
    assert str(caught.value) == (
        f"--data.tokenizer {path}: has no token '</s>' to stand between documents. "
        "Name the one it has with --data.end."
    )


def test_a_file_that_is_no_tokenizer_is_named(text):
    pytest.importorskip("tokenizers")
    with pytest.raises(DataError) as caught:
        load_tokenizer(DataConfig(tokenizer=text))
    assert str(caught.value).startswith(
        f"--data.tokenizer {text}: is no file of the `tokenizers` library ("
    )
    with pytest.raises(DataError, match="--out /no/x.json: cannot be written"):
        data = DataConfig(files=(text,))
        train_tokenizer(TokenizerConfig("/no/x.json", size=300, data=data))


def test_a_missing_tokenizer_is_named():
    with pytest.raises(DataError) as caught:
        load_tokenizer(DataConfig(tokenizer="no.json"))
    assert str(caught.value) == (
        "--data.tokenizer no.json: no such file. Give `bytes`, or make a tokenizer "
        "with train_tokenizer.py."
    )


def test_more_tokens_than_the_model_has_are_refused(tiny):
    with pytest.raises(ConfigError) as caught:
        tiny.check_vocabulary(300)
    assert str(caught.value) == (
        "--model.vocabulary 256: the tokenizer has 300 tokens. Give at least as many; "
        "a multiple of 128 is fastest."
    )


# Windows


def test_a_window_knows_its_documents():
    packed = pack(TEXTS, Bytes())
    window = packed.window(4, context=8)  # d e f g <end> h i j, and k to predict
    assert bytes(window["inputs"].astype(np.uint8)) == b"defg\xffhij"
    assert bytes(window["targets"].astype(np.uint8)) == b"efg\xffhijk"
    assert window["segments"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert window["positions"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert packed.bytes == 26


def test_every_held_out_token_but_the_first_is_a_target_once():
    packed = pack({"a": bytes(range(32, 127)).decode()}, Bytes())
    batches = list(heldout_batches(packed, 8, Share(4)))
    assert all(b["inputs"].shape == b["targets"].shape == (4, 8) for b in batches)
    targets = np.concatenate([b["targets"].ravel() for b in batches])
    assert targets[targets != PADDING].tolist() == packed.tokens_N[1:].tolist()


def test_batches_go_on_from_a_state_with_another_number_of_processes():
    packed = pack(TEXTS, Bytes())

    def rows(batches: list) -> list:
        return sorted(x.tolist() for b in batches for x in b["inputs"])

    def iterators(processes: int) -> list:
        shares = [Share(6, p, processes) for p in range(processes)]
        return [training_batches(packed, 4, share, seed=1) for share in shares]

    expected = [next(iterators(1)[0]) for _ in range(1)]
    three = iterators(3)
    assert rows([next(it) for it in three]) == rows(expected)
    (one,) = iterators(1)
    next(one)
    expected = rows([next(one)])
    states = [it.get_state() for it in three]
    assert states[0] == states[1] == states[2]
    two = iterators(2)
    for iterator in two:
        iterator.set_state(states[0])
    assert rows([next(it) for it in two]) == expected


def test_another_seed_gives_other_batches():
    packed = pack(TEXTS, Bytes())
    first, same, other = (
        next(training_batches(packed, 4, Share(6), seed)) for seed in (1, 1, 2)
    )
    assert (first["inputs"] == same["inputs"]).all()
    assert (first["inputs"] != other["inputs"]).any()


def test_text_shorter_than_a_batch_is_refused():
    with pytest.raises(DataError) as caught:
        training_batches(pack({"a": "a" * 30}, Bytes()), 32, Share(8), seed=0)
    assert str(caught.value) == (
        "the training text has 31 tokens and at least 41 are needed. Give more text, "
        "or a smaller --batch-size or --model.context."
    )


def test_unigram_entropy_of_even_bytes_is_the_log_of_their_number():
    np.testing.assert_allclose(unigram_entropy({"a": "abcdefgh" * 5}), np.log(8))
