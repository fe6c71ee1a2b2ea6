"""A tiny random BERT for tests and the debug run: real code paths, no real knowledge.

Its words are those of the stand-in texts; anything else is one unknown token.
"""

import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from replug.data.files import as_other_files
from replug.data.sources.built_in_texts import stand_in_vocabulary

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
VERSION = 1


def stand_in_encoder_path(cache: Path) -> Path:
    """A folder that `AutoModel` loads, written once."""
    folder = cache / "models" / f"stand_in_encoder-{VERSION}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=folder.parent))
        write_stand_in_encoder(staging)
        as_other_files(staging)
        try:
            staging.rename(folder)
        except OSError:  # another process was first; its copy is the same
            if not folder.exists():
                raise
    return folder


def write_stand_in_encoder(folder: Path, hidden_size: int = 32, num_layers: int = 2, seed: int = 0) -> None:
    """Write a random BERT of this size and its tokenizer."""
    words = SPECIAL + [word for topic in stand_in_vocabulary() for word in topic]
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        intermediate_size=2 * hidden_size,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BertModel(config, add_pooling_layer=False)
    model.save_pretrained(folder)
    _tokenizer(words).save_pretrained(folder)


def _tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=128,
    )
