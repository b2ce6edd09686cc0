"""Trains a byte-level BPE tokenizer on text; flags in, a file out.

python examples/lm_pretrain/train_tokenizer.py --size 2048 --out tokenizer.json
python examples/lm_pretrain/train.py --data.tokenizer tokenizer.json
"""

import dataclasses
import sys

import tyro
from config import DataConfig
from documents import DataError, load_documents, split
from tokens import library


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains a tokenizer on the documents that a run would train on."""

    out: str
    size: int = 2048
    data: DataConfig = DataConfig()


def main(config: Config) -> None:
    tokenizers = library()
    train, _ = split(load_documents(config.data))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=config.size,
        special_tokens=[config.data.end],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(train.values(), trainer)
    try:
        tokenizer.save(config.out)
    except Exception as error:  # the library raises no other
        raise DataError(f"--out {config.out}: cannot be written ({error}).") from None
    print(f"{tokenizer.get_vocab_size()} tokens in {config.out}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Config))
    except DataError as error:
        sys.exit(f"error: {error}")
