"""Checkpoint directories: configuration, end tokens, weights and tokenizer, each checked as it is read.

Whatever is wrong becomes an `InputError` of one line that names the file, or the first of the weights. What
transformers logs meanwhile is held back, because it says the same at length, and is given out once all is well.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hisparse.engine.builtin import BUILTIN_MODELS
from hisparse.engine.tokenizer import CheckpointTokenizer
from hisparse.errors import InputError

MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa")
_NAMELESS = (LookupError, TypeError, AttributeError)
"""Errors whose text alone says little: a key, or types."""


@contextmanager
def quiet_loading() -> Iterator[list[logging.LogRecord]]:
    """Neither bars nor log lines of transformers; the lines come afterwards, unless an error did. Gives the lines."""
    from transformers.utils import logging as progress

    held = _Held()
    logger = logging.getLogger("transformers")
    has_bar = progress.is_progress_bar_enabled()
    handlers, propagates = logger.handlers, logger.propagate
    # What a command shows of its progress is its own affair.
    progress.disable_progress_bar()
    logger.handlers, logger.propagate = [held], False
    try:
        yield held.records
    finally:
        logger.handlers, logger.propagate = handlers, propagates
        if has_bar:
            progress.enable_progress_bar()
    for record in held.records:
        logging.getLogger(record.name).handle(record)


class _Held(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def read_config(path: Path) -> dict[str, Any]:
    """The checked `config.json` of a checkpoint directory, as written.

    It is read here and not through transformers, which fills `index_topk` in where a configuration has none.
    """
    if not path.is_dir():
        raise InputError(f"no model at {path}: name a checkpoint directory, or one of {', '.join(BUILTIN_MODELS)}")
    file = path / "config.json"
    if not file.is_file():
        raise InputError(f"{path} has no config.json: it is not a checkpoint directory")
    config = _read_object(file)
    if config.get("model_type") not in MODEL_TYPES:
        raise InputError(f"{path} is a {config.get('model_type')!r} model; supported are {', '.join(MODEL_TYPES)}")
    if "index_topk" not in config:
        raise InputError(f"{file} has no index_topk: only models with a sparse-attention indexer are supported")
    if not _is_int(config["index_topk"]):
        raise InputError(f"{file}: index_topk is {config['index_topk']!r}; it must be a number of rows, such as 2048")
    return config


def load_config(path: Path) -> Any:
    """The transformers configuration of a checkpoint directory that `read_config` has found to be one."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises many types for a configuration that it cannot use
        raise _unusable(path, error) from error


def without_weights(config: Any, dtype: torch.dtype) -> Any:
    """The model of a configuration on torch's meta device, where it takes no memory and computes nothing."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")


def describe_weights(path: Path, config: Any, dtype: torch.dtype) -> Any:
    """`without_weights` for a checkpoint: raises `InputError` for a configuration of which no model can be made."""
    try:
        return without_weights(config, dtype)
    except Exception as error:  # the model's own code meets values that it was not written for
        raise _unusable(path, error) from error


def load_weights(
    path: Path, config: Any, dtype: torch.dtype, distributed: Any, said: Sequence[logging.LogRecord]
) -> Any:
    """The model with all its weights, as `load_model` describes it. `said`: what transformers has logged."""
    from transformers import AutoModelForCausalLM

    # The annotation of from_pretrained knows nothing of what output_loading_info adds.
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, info = load(
            path,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
            distributed_config=distributed,
            # They are refused below, where it can be said which they are.
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # transformers, safetensors and torch raise many types for a damaged checkpoint
        # The configuration is to blame where it makes no model even without weights.
        describe_weights(path, config, dtype)
        why = _conversion_error(said) or one_line(error)
        raise InputError(f"the weights of {path} cannot be loaded: {why}") from error
    _check_loaded(path, info)
    return model


def _check_loaded(path: Path, info: dict[str, Any]) -> None:
    if missing := sorted(info["missing_keys"]):
        raise InputError(f"{path} lacks {_count(missing)} that its configuration wants, the first is {missing[0]}")
    if wrong := sorted(info["mismatched_keys"]):
        name, found, wanted = wrong[0]
        raise InputError(
            f"{path} has {_count(wrong)} of another shape than its configuration wants, the first is {name}: "
            f"{list(found)} instead of {list(wanted)}"
        )


def _conversion_error(said: Sequence[logging.LogRecord]) -> str | None:
    """The first weight that could not be put together from several, and why: the error only refers to the log."""
    report = "\n".join(record.getMessage() for record in said)
    found = re.search(r"^(\S+) *\| *\S*CONVERSION.*?^\w+Error: ([^\n]*)", report, re.MULTILINE | re.DOTALL)
    return f"{found[1]}: {found[2]}" if found else None


def _count(weights: Sequence[object]) -> str:
    return f"{len(weights)} weight{'s' if len(weights) > 1 else ''}"


def load_tokenizer(path: Path, config: Any, eos_token_ids: tuple[int, ...]) -> CheckpointTokenizer:
    """The tokenizer of a checkpoint directory, for the model of `config`."""
    from transformers import AutoTokenizer

    try:
        inner = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the same: the type depends on which file is missing or damaged
        files = [path / name for name in ("tokenizer.json", "tokenizer_config.json")]
        for file in files:
            if file.is_file():
                _read_object(file)
        if not files[0].is_file():
            raise InputError(f"{path} has no tokenizer.json, and no other tokenizer that can be loaded") from error
        raise InputError(f"{files[0]} is no tokenizer that can be loaded: {one_line(error)}") from error
    return CheckpointTokenizer(inner, int(config.vocab_size), eos_token_ids)


def eos_ids(path: Path, config: Any) -> tuple[int, ...]:
    """End tokens: those of `generation_config.json` if it names any, else the configuration's.

    Raises `InputError` for what is no token of the vocabulary.
    """
    file = path / "generation_config.json"
    value = _read_object(file).get("eos_token_id") if file.is_file() else None
    if value is None:
        file, value = path / "config.json", config.eos_token_id
    if value is None:
        return ()
    tokens = value if isinstance(value, list) else [value]
    vocab = int(config.vocab_size)
    for token in tokens:
        if not _is_int(token) or not 0 <= token < vocab:
            raise InputError(
                f"{file}: eos_token_id is {value!r}; it must be a token id of the vocabulary, 0 to {vocab - 1}, or a "
                "list of them"
            )
    return tuple(tokens)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise InputError(f"{file} cannot be used: it holds no JSON object")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unusable(path: Path, error: Exception) -> InputError:
    return InputError(f"the configuration of {path} cannot be used: {one_line(error)}")


def one_line(error: BaseException) -> str:
    """The text of an error without line ends, and without headings that only announce what follows."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines = [re.sub(r"^\w+Error: ", "", lines[1]), *lines[2:]]
    # A list of all types that would have been right says less than what was wrong.
    text = " ".join(lines).split(". Errors: ")[0]
    if not text or isinstance(error, _NAMELESS):
        return f"{type(error).__name__} {text}".rstrip()
    return text
