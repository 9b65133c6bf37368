"""From what a caller hands over as model and tokenizer to one directory that any engine can load.

A model that is built already is written to a private directory, as a checkpoint: so it is read by
the same code as every other, in this process or in others. Weights beside another tokenizer are
linked, not copied.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

from homing.errors import ConfigError
from homing.llm.config import process_environ

log = logging.getLogger(__name__)

ModelLike: TypeAlias = Any
"""A path (str or Path), None for the demo model, or a transformers `PreTrainedModel`."""
TokenizerLike: TypeAlias = Any
"""A directory (str or Path), or a transformers fast tokenizer."""

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "added_tokens.json"),
)
_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


def model_path(model: ModelLike, tokenizer: TokenizerLike | None, stack: ExitStack) -> str | None:
    """What to load. Private directories are removed when `stack` closes.

    Raises `ValueError` for what is neither a model nor a tokenizer, `ConfigError` for a path where
    there is none and for a built model without a tokenizer.
    """
    if is_path(model):
        if model is not None and not Path(model).expanduser().exists():
            raise ConfigError(f"no model at {model}: name a Hugging Face directory or a .gguf file")
        if tokenizer is None:
            return None if model is None else str(model)
        return _with_tokenizer(_directory_of(model), tokenizer, stack)
    if not (hasattr(model, "state_dict") and hasattr(model, "config")):
        raise ValueError(
            f"model is of type {type(model).__name__}; it must be a path or a transformers model"
        )
    if tokenizer is None:
        raise ConfigError("a built model comes without a tokenizer: name one by tokenizer=")
    name = Path(getattr(model.config, "_name_or_path", "")).name or type(model).__name__
    directory = _private_directory(stack, name)
    _save_model(model, directory)
    _put_tokenizer(tokenizer, directory)
    return str(directory)


def dtype_of(model: ModelLike) -> str | None:
    """The dtype of a built model's weights, as the engine calls it; None if nothing is built."""
    return None if is_path(model) else _DTYPES.get(str(model.dtype))


def is_path(model: ModelLike) -> bool:
    return model is None or isinstance(model, str | Path)


def _directory_of(model: str | Path | None) -> Path:
    """A GGUF file is converted here, once, as an engine would."""
    path = None if model is None else Path(model).expanduser()
    if path is not None and path.is_dir():
        return path
    from homing.engine.weights import resolve_model
    from homing.native import default_cache_dir

    return resolve_model(
        None if path is None else str(path),
        cache_dir=default_cache_dir(process_environ()),
        on_progress=log.info,
    ).directory


def _with_tokenizer(model: Path, tokenizer: TokenizerLike, stack: ExitStack) -> str:
    """A directory under the model's own name, for that is what it is served as."""
    directory = _private_directory(stack, model.resolve().name)
    for file in model.resolve().iterdir():
        if file.name not in _TOKENIZER_FILES:
            (directory / file.name).symlink_to(file)
    _put_tokenizer(tokenizer, directory)
    return str(directory)


def _save_model(model: Any, directory: Path) -> None:
    """The architecture is checked first: weights take long to write."""
    from homing.engine.models.config import read_config

    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    try:
        read_config(directory)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix(f"{directory}: ")) from None
    model.save_pretrained(directory)


def _put_tokenizer(tokenizer: TokenizerLike, directory: Path) -> None:
    if isinstance(tokenizer, str | Path):
        source = Path(tokenizer).expanduser().resolve()
        if not (source / "tokenizer.json").is_file():
            raise ConfigError(f"{source} holds no tokenizer.json")
        for name in _TOKENIZER_FILES:
            if (source / name).is_file():
                (directory / name).symlink_to(source / name)
    elif hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(directory)
        if not (directory / "tokenizer.json").is_file():
            raise ConfigError(
                f"{type(tokenizer).__name__} has no tokenizer.json: give a fast tokenizer"
            )
    else:
        raise ValueError(
            f"tokenizer is of type {type(tokenizer).__name__}; it must be a directory or a "
            "transformers tokenizer"
        )


def _private_directory(stack: ExitStack, name: str) -> Path:
    parent = stack.enter_context(tempfile.TemporaryDirectory(prefix="homing-model-"))
    directory = Path(parent, name)
    directory.mkdir()
    return directory
