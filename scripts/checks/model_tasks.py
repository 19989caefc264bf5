"""Which models does scripts/checks/models.py try, and what are they given? By name, and by number for ranks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan import zoo
from pipeplan.runtime.model.build.hugging_face import named
from scripts.checks.written import architectures, sequences, transformers_models, ways
from scripts.checks.written.row import BATCH
from scripts.checks.written.row import Row as Written

HF = {
    "gpt2": "GPT2LMHeadModel,n_layer=4,n_embd=32,n_head=4,vocab_size=97,n_positions=32,sequence=16",
    "llama": "LlamaForCausalLM,{text},num_key_value_heads=2",
    "mistral": "MistralForCausalLM,{text},num_key_value_heads=2",
    "mixtral": "MixtralForCausalLM,{text},num_key_value_heads=2,num_local_experts=4",
    "qwen2": "Qwen2ForCausalLM,{text},num_key_value_heads=2",
    "qwen3": "Qwen3ForCausalLM,{text},num_key_value_heads=2,head_dim=8",
    "gemma2": "Gemma2ForCausalLM,{text},num_key_value_heads=2,head_dim=8",
    "phi3": "Phi3ForCausalLM,{text},num_key_value_heads=2,pad_token_id=0",
    "olmo2": "Olmo2ForCausalLM,{text},num_key_value_heads=2",
    "gpt-neox": "GPTNeoXForCausalLM,{text}",
    "opt": "OPTForCausalLM,num_hidden_layers=4,hidden_size=32,ffn_dim=64,num_attention_heads=4,vocab_size=97,"
    "word_embed_proj_dim=32,max_position_embeddings=32,sequence=16",
    "bloom": "BloomForCausalLM,n_layer=4,hidden_size=32,n_head=4,vocab_size=97,sequence=16",
    "falcon": "FalconForCausalLM,num_hidden_layers=4,hidden_size=32,num_attention_heads=4,vocab_size=97,sequence=16",
    "mamba": "MambaForCausalLM,num_hidden_layers=4,hidden_size=32,vocab_size=97,state_size=4,sequence=16",
    "bert": "BertForMaskedLM,{text}",
    "bert-classes": "BertForSequenceClassification,{text}",
    "bert-answers": "BertForQuestionAnswering,{text}",
    "roberta": "RobertaForMaskedLM,{text},max_position_embeddings=32",
    "distilbert": "DistilBertForMaskedLM,n_layers=4,dim=32,hidden_dim=64,n_heads=4,vocab_size=97,sequence=16",
    "electra": "ElectraForTokenClassification,{text},embedding_size=16",
    "albert": "AlbertForMaskedLM,{text},embedding_size=16",
    "deberta-v2": "DebertaV2ForMaskedLM,{text}",
    "t5": "T5ForConditionalGeneration,d_model=32,d_kv=8,d_ff=64,num_layers=2,num_heads=4,vocab_size=97,sequence=16",
    "bart": "BartForConditionalGeneration,{seq2seq}",
    "pegasus": "PegasusForConditionalGeneration,{seq2seq}",
    "whisper": "WhisperForConditionalGeneration,{seq2seq},num_mel_bins=8,max_source_positions=16,"
    "max_target_positions=32,decoder_start_token_id=0,pad_token_id=0,bos_token_id=0,eos_token_id=1",
    "vit": "ViTForImageClassification,{vision}",
    "deit": "DeiTForImageClassification,{vision}",
    "beit": "BeitForImageClassification,{vision}",
    "dinov2": "Dinov2ForImageClassification,num_hidden_layers=4,hidden_size=32,num_attention_heads=4,image_size=32,"
    "patch_size=8",
    "swin": "SwinForImageClassification,image_size=64,patch_size=4,embed_dim=8,window_size=4,depths=[2,2],"
    "num_heads=[2,4]",
    "convnext": "ConvNextForImageClassification,image_size=32,num_channels=3",
    "segformer": "SegformerForSemanticSegmentation,image_size=32",
}
PARTS = {
    "text": "num_hidden_layers=4,hidden_size=32,intermediate_size=64,num_attention_heads=4,vocab_size=97,sequence=16",
    "seq2seq": "d_model=32,encoder_layers=2,decoder_layers=2,encoder_attention_heads=4,decoder_attention_heads=4,"
    "encoder_ffn_dim=64,decoder_ffn_dim=64,vocab_size=97,sequence=16",
    "vision": "num_hidden_layers=4,hidden_size=32,intermediate_size=64,num_attention_heads=4,image_size=32,"
    "patch_size=8",
}
VISION = {
    "resnet18": 64, "googlenet": 64, "inception_v3": 299, "efficientnet_b0": 64, "mobilenet_v3_small": 64,
    "convnext_tiny": 64, "swin_t": 64, "vit_b_16": 224, "densenet121": 64, "shufflenet_v2_x1_0": 64,
    "regnet_y_400mf": 64, "squeezenet1_1": 64, "segmentation.deeplabv3_resnet50": 64,
}  # fmt: skip
TIMM = {"mixer_s32_224": 224, "resmlp_12_224": 224, "levit_128s": 224, "convmixer_768_32": 64, "ghostnet_100": 64}
ZOO = ("gpt-tiny,tied=true", "llama-tiny", "small-cnn", "awd-lm,hidden=24,embedding=16,vocabulary=130,sequence=6",
       "gnmt,hidden=16,vocabulary=130,sequence=6", "inception-v3-auxiliary,image=299")  # fmt: skip


# --- models of torch alone ------------------------------------------------------------------------------------------


class Whole(nn.Module):
    """Layers of the zoo as one module, so that it is traced."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


class Translating(nn.Module):
    """torch's own transformer, from tokens to tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(29, 16), nn.Linear(16, 29)
        self.transformer = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        states = self.transformer(self.tokens(source), self.tokens(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(states)


class Recurrent(nn.Module):
    """An LSTM over tokens, with its last states among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.states = nn.Embedding(29, 16), nn.LSTM(16, 16, 2, batch_first=True)
        self.head = nn.Linear(16, 29)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        states, (last, _) = self.states(self.tokens(x))
        return {"logits": self.head(states), "last": last}


class UNet(nn.Module):
    """Two levels down and up, with a skip over each."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(2 * width, 2, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width, width, 3, stride=2, padding=1) for _ in range(2))
        self.up = nn.ModuleList(nn.ConvTranspose2d(width * (1 + i), width, 2, stride=2) for i in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.enter(x)]
        for down, norm in zip(self.down, self.norms, strict=True):
            levels.append(functional.relu(norm(down(levels[-1]))))
        y = levels.pop()
        for up in self.up:
            y = torch.cat((up(y), levels.pop()), dim=1)
        return self.leave(y)


def _tokens(logits: Any, target: Tensor) -> Tensor:
    found = logits["logits"] if isinstance(logits, dict) else logits
    return functional.cross_entropy(found.flatten(0, 1), target.flatten())


def _numbers(generator: torch.Generator, *shape: int, below: int) -> Tensor:
    return torch.randint(below, shape, generator=generator)


OWN: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Any], Any]] = {
    "nn.Transformer": (
        Translating,
        lambda g: ((_numbers(g, BATCH, 8, below=29), _numbers(g, BATCH, 8, below=29)), _numbers(g, BATCH, 8, below=29)),
        _tokens,
    ),
    "nn.LSTM": (Recurrent, lambda g: (_numbers(g, BATCH, 8, below=29), _numbers(g, BATCH, 8, below=29)), _tokens),
    "u-net": (
        UNet,
        lambda g: (torch.randn(BATCH, 3, 16, 16, generator=g), _numbers(g, BATCH, 16, 16, below=2)),
        functional.cross_entropy,
    ),
}

WRITTEN: dict[str, Written] = {f"transformers:{name}": row for name, row in transformers_models.ROWS.items()}
WRITTEN |= architectures.ROWS | sequences.ROWS | ways.ROWS


# --- finding them ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A model: ``build(batch)`` and ``data(index, seed)`` as a user writes them."""

    build: Callable[[int], Any]
    data: Callable[[int, int], Any]
    draws: bool = False


def __getattr__(name: str) -> Any:
    """Return ``build_KEY`` or ``data_KEY`` of a model, as ranks look them up."""
    kind, _, key = name.partition("_")
    if kind in ("build", "data") and key.isdigit():
        return getattr(task(list(names())[int(key)]), kind)
    raise AttributeError(name)


def names() -> Iterator[str]:
    """Yield what the models are called."""
    yield from OWN
    yield from WRITTEN
    yield from (f"zoo:{name}" for name in ZOO)
    yield from (f"transformers:{name}" for name in HF)
    yield from (f"torchvision:{name}" for name in VISION)
    yield from (f"timm:{name}" for name in TIMM)


def task(name: str) -> Task:
    """Return the model called ``name``; ImportError where its library isn't installed."""
    library, _, key = name.partition(":")
    if library in ("transformers", "torchvision", "timm"):
        _torchvision_imports()  # before transformers, which looks for it
    if name in WRITTEN:
        return of_row(WRITTEN[name])
    if name in OWN:
        make, sample, loss = OWN[name]
        return _task(make, sample, loss)
    if library == "zoo":
        model = zoo.load(key)
        return Task(lambda batch: _without_chance(_whole(model(batch))), model.data(BATCH))
    if library == "transformers":
        found = named(HF[key].format(**PARTS))
        return Task(lambda batch: _without_chance(_quiet(found)(batch)), found.data(BATCH))
    size = (VISION if library == "torchvision" else TIMM)[key]
    make = _torchvision(key) if library == "torchvision" else _timm(key)

    def sample(generator: torch.Generator) -> Any:
        many = (BATCH, size, size) if "segmentation" in key else (BATCH,)
        return torch.randn(BATCH, 3, size, size, generator=generator), _numbers(generator, *many, below=10)

    return _task(make, sample, _classes)


def of_row(row: Written) -> Task:
    """Return the model of a row."""
    return _task(row.make, row.sample, row.loss, row.draws)


def _task(
    make: Callable[[], nn.Module], sample: Callable[[torch.Generator], Any], loss: Any, draws: bool = False
) -> Task:
    def data(index: int, seed: int) -> Any:
        return sample(torch.Generator().manual_seed(1000 * seed + index))

    def build(batch: int) -> Any:
        torch.manual_seed(0)
        compared = loss() if isinstance(loss, type) else loss  # a loss with weights is made with its model
        built = (make(), data(0, 0) if loss is None else data(0, 0)[0], compared)
        return built if draws else _without_chance(built)

    return Task(build, data, draws)


def _whole(built: Any) -> Any:
    layers, example, loss = built
    return Whole(layers), example, loss


def _without_chance(built: Any) -> Any:
    for part in built[0].modules():
        for attribute in ("p", "dropout", "drop_prob", "drop_rate"):
            if isinstance(getattr(part, attribute, None), float):
                setattr(part, attribute, 0.0)
    return built


def _quiet(found: Any) -> Any:
    for key, value in vars(found.config).items():
        if isinstance(value, float) and ("drop" in key or "jitter" in key):
            setattr(found.config, key, 0.0)
    return found


def _torchvision_imports() -> None:
    """Let torchvision be imported, where it is, even if its compiled operations are for another build of torch."""
    if _KEPT or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # no model here needs what is missing, but its name
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
        for name in [x for x in sys.modules if x.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


_KEPT: list[Any] = []


def _torchvision(key: str) -> Callable[[], nn.Module]:
    import torchvision

    found = torchvision.models
    for part in key.split("."):
        found = getattr(found, part)
    more = {"weights_backbone": None} if "segmentation" in key else {}
    more |= {"init_weights": False} if key in ("googlenet", "inception_v3") else {}
    return lambda: found(weights=None, num_classes=10, **more)


def _timm(key: str) -> Callable[[], nn.Module]:
    import timm

    return lambda: timm.create_model(key, pretrained=False, num_classes=10)


def _classes(output: Any, target: Tensor) -> Tensor:
    if hasattr(output, "logits"):  # a named tuple with auxiliary heads
        others = [x for name, x in zip(output._fields, output, strict=True) if name != "logits" and x is not None]
        return _classes(output.logits, target) + 0.3 * sum(_classes(x, target) for x in others)
    if isinstance(output, dict):
        return functional.cross_entropy(output["out"], target)
    return functional.cross_entropy(output, target)
