"""Which transformers model does ``hf:CONFIG`` name, and what is it trained on? Nothing is downloaded.

``CONFIG`` is a config file, a folder with one, or the name of a class, each with options after commas, which replace
entries of the config: ``hf:LlamaForCausalLM,num_hidden_layers=4``. Weights are random unless the folder has some. The
data are random numbers in the shapes of the model's inputs, labels among them, for the loss is the model's own.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from ....errors import BadInput
from ....files.text import read_text
from ....zoo.model import Data, mixed_seed
from ....zoo.text.gpt import Again
from ....zoo.text.rank_part import Group
from ..structure import refilling, tensors_in
from ..user_code import user_code
from .tensor_plan import part_of, spread

CONFIG = "config.json"
DEGREES = {"tensor": "ranks", "expert_ranks": "experts", "context": "context"}  # options that a group has
SEQUENCE = "sequence"  # the option that is none of a config: how many tokens a sample has
START = "decoder_start_token_id"
ATTENTION, AGAIN = "attn_implementation", "again"  # how it attends; so, that the backward runs its core again
ANYWHERE = (START, "image_size", ATTENTION)  # entries that models or their inputs read, and not all configs have
LONGEST = 128  # tokens of a sample, unless more are asked for
ALONE = Group()
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class HuggingFace:
    """A transformers model: its class, its config, its folder if there are weights to load, tokens in a sample, and the
    group of which it is one rank's part."""

    text: str
    kind: Any
    config: Any
    weights: Path | None
    sequence: int
    group: Group = ALONE
    brings_data: ClassVar[bool] = True

    def __call__(self, batch: int, *, seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return the model and an example batch; random weights depend on ``seed`` alone."""
        with torch.random.fork_rng(devices=[]), user_code(f"hf:{self.text}"):
            torch.manual_seed(seed)
            if self.weights is not None and detect_fake_mode() is None:
                model = self.kind.from_pretrained(self.weights, config=self.config, local_files_only=True).float()
            else:
                # fake weights get no numbers: some ways to draw them look at what they drew
                without = getattr(getattr(_library(), "initialization", None), "no_init_weights", nullcontext)
                with nullcontext() if detect_fake_mode() is None else without():
                    model = self.kind(deepcopy(self.config))
            if self.group.experts > 1:
                spread(model, self.group)
            elif self.group.ranks > 1:
                part_of(model, self.group)
            self.group.mark(model)
            if self.config._attn_implementation == AGAIN and not any(map(_own_attention, model.modules())):
                raise BadInput(
                    f"hf: {type(model).__name__} has attention that cannot be replaced by one that runs again"
                )
        return model, inputs_of(self.kind, self.config, batch, self.sequence, _generator(0, seed))

    @property
    def dtype(self) -> torch.dtype | None:
        """The type that weights have in the folder, as its config says; None if it doesn't."""
        found = getattr(self.config, "dtype", None)
        return found if isinstance(found, torch.dtype) else None

    def beside(self) -> tuple[str, bytes]:
        """Return the name of the file, and what is in it, by which its library knows what a state beside it is of."""
        self.config.architectures = [self.kind.__name__]
        return CONFIG, self.config.to_json_string().encode()

    def data(self, batch: int) -> Data:
        """Return ``data(index, seed)`` of microbatches of ``batch`` samples."""
        if batch < 1:
            raise BadInput(f"batch: {batch} is not a positive number of samples")

        def microbatch(index: int, seed: int) -> Any:
            return inputs_of(self.kind, self.config, batch, self.sequence, _generator(index, seed))

        return microbatch


def _generator(index: int, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(mixed_seed(seed, index))


def named(text: str, part: Group = ALONE) -> HuggingFace:
    """Return the model that ``text`` names, or a ``part`` of it; BadInput if there is none, or transformers isn't
    installed."""
    what, *options = re.split(r",(?![^\[]*\])", text)  # a list is one value: depths=[2,2]
    library = _library()
    given = dict(_option(option) for option in options)
    asked = given.pop(SEQUENCE, None)
    along = given.pop("sequence_parallel", False) is True
    degrees = {own: int(given.pop(name, 1)) for name, own in DEGREES.items()}
    group = Group(sequence_parallel=along, by_heads=given.pop("by_heads", False) is True, **degrees)
    if given.get(ATTENTION) == AGAIN:
        library.AttentionInterface.register(AGAIN, _attended_again)
        library.AttentionMaskInterface.register(AGAIN, library.masking_utils.eager_mask)
    path = Path(what)
    if path.exists() or what.endswith(".json") or "/" in what:
        kind, config = _from_file(library, path / CONFIG if path.is_dir() else path, given)
    else:
        kind, config = _from_class(library, what, given)
    found = path if path.is_dir() and any(next(path.glob(x), None) for x in WEIGHTS) else None
    longest = getattr(_text(config), "max_position_embeddings", None) or LONGEST
    length = group.part(int(asked) if asked is not None else min(LONGEST, longest))
    return HuggingFace(text, kind, config, found, length, group if part.place is None else part)


def _own_attention(module: nn.Module) -> Any:
    """Return how a module attends kernel by kernel, as its author has it; None where transformers doesn't call that."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def _attended_again(module: nn.Module, *tensors: Tensor | None, **said: Any) -> tuple[Tensor, None]:
    """Attend as ``module`` does kernel by kernel, all of which the backward runs again; BadInput where it has weights
    for that."""
    bare = SimpleNamespace(**{name: value for name, value in vars(module).items() if not name.startswith("_")})
    own, given = _own_attention(module), refilling((tensors, said))

    def core(*inputs: Tensor) -> Tensor:
        tensors, said = given(inputs)
        out: Tensor = own(bare, *tensors, **said)[0]
        return out

    try:
        return Again.apply(core, *tensors_in((tensors, said))), None  # type: ignore[no-untyped-call]  # torch's
    except AttributeError as error:
        raise BadInput(
            f"hf: {type(module).__name__} attends with {error.name} of its own, so its core can't run again alone"
        ) from error


def _library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise BadInput(
            f"hf: needs transformers, which cannot be imported: {error}; pip install transformers"
        ) from error
    return transformers


def _class_of(library: Any, name: str) -> Any:
    """Return what is called so in ``library``, or None; BadInput where what that imports cannot be."""
    try:
        return getattr(library, name, None)
    except ImportError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        why = str(cause).partition("\n")[0]
        raise BadInput(f"hf: {name} of transformers {library.__version__} cannot be imported: {why}") from error


def _from_class(library: Any, name: str, options: dict[str, Any]) -> tuple[Any, Any]:
    kind = _class_of(library, name)
    if kind is None or getattr(kind, "config_class", None) is None:
        near = get_close_matches(name, [x for x in dir(library) if "For" in x or x.endswith("Model")], 3)
        more = f"; did you mean {' or '.join(near)}?" if near else ""
        raise BadInput(
            f"hf:{name}: neither a file, nor a folder, nor a model of transformers {library.__version__}{more}"
        )
    return kind, _configured(f"hf:{name}", kind.config_class, {}, options)


def _from_file(library: Any, path: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    try:
        entries = json.loads(read_text(str(path)))
    except BadInput as error:
        raise BadInput(f"hf: {error}") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"hf: {path}: isn't JSON: {error}") from error
    if not isinstance(entries, dict) or not isinstance(entries.get("model_type"), str):
        raise BadInput(f"hf: {path}: has no model_type, so it isn't a config of a transformers model")
    mapping = library.models.auto.configuration_auto.CONFIG_MAPPING
    if entries["model_type"] not in mapping:
        raise BadInput(
            f"hf: {path}: model_type {entries['model_type']!r} isn't in transformers {library.__version__}; code "
            "that a config names isn't executed: import it in a build(batch) of your own"
        )
    names = entries.get("architectures") or []
    name = options.pop("class", names[0] if names else None)
    kind = _class_of(library, str(name))
    if kind is None:
        raise BadInput(f"hf: {path}: names no class in architectures that transformers has; add ,class=NAME")
    return kind, _configured(f"hf: {path}", mapping[entries["model_type"]], entries, options)


def _configured(where: str, kind: Any, entries: dict[str, Any], options: dict[str, Any]) -> Any:
    """Return the config of ``entries`` with some replaced; what follows from others does so anew."""
    with user_code(where):
        config = kind.from_dict(entries)
        for key in options:
            if key not in entries and key not in ANYWHERE and not hasattr(config, key):
                near = get_close_matches(key, [*config.to_dict(), SEQUENCE], 3)
                more = f"; did you mean {' or '.join(near)}?" if near else ""
                raise BadInput(f"{where}: {kind.__name__} has no entry {key!r}{more}")
        config = kind.from_dict({**entries, **options})
        if getattr(config, "is_encoder_decoder", False) and getattr(config, START, None) is None:
            setattr(config, START, getattr(config, "pad_token_id", None) or 0)  # labels are shifted behind it
        return config


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise BadInput(f"option {text!r} is not of the form key=value")
    try:
        return key, json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    except ValueError:
        return key, value


# --- what goes in ---------------------------------------------------------------------------------------------------


def inputs_of(kind: Any, config: Any, batch: int, sequence: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random inputs of a model of class ``kind``, with the labels that its loss compares."""

    def numbers(*shape: int, below: int) -> Tensor:
        return torch.randint(below, shape, generator=generator)

    name, main = kind.__name__, kind.main_input_name
    text = _text(config)
    words = getattr(text, "vocab_size", None)
    made: dict[str, Tensor] = {}
    if main == "input_ids" and words:
        made[main] = numbers(batch, sequence, below=words)
    elif main == "pixel_values":
        made[main] = torch.randn(batch, getattr(config, "num_channels", 3), *_image(config), generator=generator)
    elif main == "input_features" and hasattr(config, "num_mel_bins"):
        frames = 2 * getattr(config, "max_source_positions", sequence)
        made[main] = torch.randn(batch, config.num_mel_bins, frames, generator=generator)
    else:
        raise BadInput(f"hf: {name} reads {main}, for which nothing can be made up; {_STEP}")
    labels = next((make for ending, make in _LABELS.items() if ending in name), None)
    if labels is None:
        raise BadInput(f"hf: {name} has no head whose labels are known ({', '.join(_LABELS)}); {_STEP}")
    if labels == "same":
        return made | {"labels": made[main].clone()}
    if labels == "answer":
        return made | {x: numbers(batch, below=sequence) for x in ("start_positions", "end_positions")}
    if labels == "word":
        return made | {"labels": numbers(batch, sequence, below=words or 2)}
    shape = {"sample": (), "token": (sequence,), "pixel": _image(config)}[labels]
    return made | {"labels": numbers(batch, *shape, below=config.num_labels)}


_STEP = "write a build(batch) that returns (model, example batch), and name it as module:build"


def _text(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _image(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", None) or 224
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


_LABELS = {  # by a part of a class's name, of what its labels are classes: the input itself predicts what comes next
    "CausalLM": "same",
    "LMHeadModel": "same",
    "MaskedLM": "word",
    "ConditionalGeneration": "word",
    "Seq2SeqLM": "word",
    "SequenceClassification": "sample",
    "ImageClassification": "sample",
    "AudioClassification": "sample",
    "TokenClassification": "token",
    "QuestionAnswering": "answer",
    "SemanticSegmentation": "pixel",
}
