import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode

from pipeplan import zoo
from pipeplan.errors import BadInput
from pipeplan.zoo.data import corpus

# parameters as published, of the picture networks as in torchvision's model tables; heads of GPT-2 and AWD-LM tied
PUBLISHED = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    # by hand of config.json on huggingface.co of mistralai/Mixtral-8x7B-v0.1, Qwen/Qwen3-30B-A3B and -235B-A22B, and
    # deepseek-ai/DeepSeek-V3 (its biases of routers included, and not its module of multi-token prediction)
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "densenet121": 7_978_856,
    "inception-v3": 23_834_568,
    "inception-v3-auxiliary": 27_161_264,
}
ABOUT = {  # as their papers or reference implementations round them
    "awd-lm": 24e6,
    "gnmt": 160e6,
    "clip-large": 428e6,
    "llava-7b": 7.06e9,
}
MYELIN_BILLIONS = {"myelin-12b": 12, "myelin-24b": 24, "myelin-50b": 50, "myelin-100b": 100}
SMALL = [
    "gpt-tiny", "llama-tiny", "small-cnn", "alexnet,image=63,classes=10", "resnet50,image=32,classes=10",
    "densenet121,growth=8,image=32,classes=10", "awd-lm,embedding=32,hidden=48,vocabulary=128,sequence=16",
    "gnmt,hidden=32,vocabulary=128,sequence=16",
]  # fmt: skip


def count(layers):
    return sum(p.numel() for p in layers.parameters())


def on_meta(name, **options):
    with torch.device("meta"):
        return zoo.load(name)(2, **options)  # batch norm over single values refuses a batch of 1


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_published_parameter_counts(name, parameters):
    layers, example_input, _ = on_meta(name)
    assert count(layers) == parameters
    assert example_input.is_meta


@pytest.mark.parametrize(("name", "parameters"), ABOUT.items())
def test_known_sizes(name, parameters):
    assert count(on_meta(name)[0]) == pytest.approx(parameters, rel=0.02)


@pytest.mark.parametrize(("name", "billions"), MYELIN_BILLIONS.items())
def test_myelin_sizes_round_to_the_table(name, billions):
    layers, _, _ = on_meta(name)
    assert count(layers) / 1e9 == pytest.approx(billions, rel=0.025)
    model = zoo.load(name).config
    formula = 12 * model.blocks * model.hidden**2  # Myelin's flop count, section VI.D, is 8 of these per token
    assert count(layers) == pytest.approx(formula, rel=0.025)


def test_all_names_load_and_run_on_meta():
    for name in zoo.MODELS:
        has = zoo.load(name).config
        few = ",blocks=2" if hasattr(has, "blocks") else ",sequence=8" if hasattr(has, "sequence") else ""
        layers, x, loss = on_meta(name + few)
        with torch.device("meta"):
            _, target = zoo.load(name + few).data(2)(0, 0)
            assert loss(layers(*x) if isinstance(x, tuple) else layers(x), target).shape == (), name


def test_registry_needs_no_torch():
    code = "import sys; import pipeplan.zoo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", SMALL)
def test_data_fits_what_the_build_gives(name):
    model = zoo.load(name)
    layers, example_input, loss = model(3)
    x, target = model.data(3)(0, 0)
    assert (x.shape, x.dtype) == (example_input.shape, example_input.dtype)
    assert x.shape[0] == 3
    assert loss(layers(x), target).dim() == 0


@pytest.mark.parametrize("name", SMALL)
def test_data_depends_on_index_and_seed_alone(name):
    first, again = zoo.load(name).data(2), zoo.load(name).data(2)
    torch.rand(3)
    for a, b in zip(first(7, 1), again(7, 1), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first(7, 1)[0], first(8, 1)[0])
    assert not torch.equal(first(7, 1)[0], first(7, 2)[0])
    assert not torch.equal(first(1, 7)[0], first(7, 1)[0])


def test_text_target_is_the_next_character():
    x, target = zoo.load("gpt-tiny").data(4)(3, 5)
    assert torch.equal(x[:, 1:], target[:, :-1])
    assert len(corpus()) > 300_000
    assert int(corpus().max()) < 128


@pytest.mark.parametrize("name", [x for x in SMALL if "alexnet" not in x])  # whose parameters are many
def test_parameters_depend_on_seed_and_layer_alone(name):
    model = zoo.load(name)
    state = torch.get_rng_state()
    layers, again, other = model(1)[0], model(1)[0], model(1, seed=1)[0]
    assert torch.equal(torch.get_rng_state(), state)
    values, same, different = (layers.state_dict(), again.state_dict(), other.state_dict())
    assert all(torch.equal(values[key], same[key]) for key in values)
    assert any(not torch.equal(values[key], different[key]) for key in values)


def test_a_block_is_the_same_in_a_deeper_gpt_and_differs_from_its_neighbours():
    shallow, deep = zoo.load("gpt-tiny")(1)[0], zoo.load("gpt-tiny")(1, blocks=6)[0]
    assert len(deep) == len(shallow) + 2
    assert torch.equal(shallow.block1.attention.weight, deep.block1.attention.weight)
    assert not torch.equal(shallow.block1.attention.weight, shallow.block2.attention.weight)


LEARNERS = [
    ("gpt-tiny", 30, 1e-2),
    ("llama-tiny", 30, 1e-2),
    ("small-cnn", 30, 1e-2),
    ("awd-lm,embedding=32,hidden=48,vocabulary=128,sequence=16", 60, 1e-2),
    ("gnmt,hidden=32,vocabulary=128,sequence=16", 60, 1e-2),
]


@pytest.mark.parametrize(("name", "steps", "rate"), LEARNERS)
def test_the_data_can_be_learnt(name, steps, rate):
    model = zoo.load(name)
    layers, _, loss = model(8)
    data = model.data(8)
    optimizer = torch.optim.Adam(layers.parameters(), lr=rate)
    losses = []
    for index in range(steps):
        x, target = data(index, 0)
        value = loss(layers(x), target)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert sum(losses[-5:]) / 5 < 0.8 * losses[0]


def test_options():
    model = zoo.load("gpt-tiny,blocks=2,tied=true,dropout=0.5")
    assert (model.config.blocks, model.config.tied, model.config.dropout) == (2, True, 0.5)
    layers, example_input, _ = model(2, sequence=16)
    assert example_input.shape == (2, 16)
    assert len(layers) == 5
    assert layers.head.weight is layers.embedding.tokens.weight


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt-4", "no model is named 'gpt-4'; the zoo has gpt-tiny"),
        ("gpt-tiny,depth=2", "no option is named 'depth'; this model has attention, blocks, "),
        ("gpt-tiny,blocks", "not of the form key=value"),
        ("gpt-tiny,blocks=two", "blocks=two: expected a value like 4"),
        ("gpt-tiny,tied=maybe", "tied=maybe: expected a value like false"),
    ],
)
def test_wrong_names_and_options(text, message):
    with pytest.raises(BadInput, match=message):
        zoo.load(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt-tiny,heads=3", "64 is not a multiple of heads: 3"),
        ("gpt-tiny,vocabulary=50", "less than the text's 128"), ("gpt-tiny,sequence=10000000", "longer than the text"),
        ("small-cnn,image=2", "image: 2 pixels are too few for this network; it takes 4"),
        ("alexnet,image=62", "it takes 63 at least"), ("vgg16,depth=17", "no VGG-17, only 11, 13, 16, 19"),
        ("resnet50,depth=18", "no bottleneck ResNet-18"), ("inception-v3,image=74", "image: 74 pixels are too few"),
        ("inception-v3-auxiliary,image=200", "it takes 299 at least"), ("llama-tiny,groups=3", "4 heads in 3 groups"),
        ("gnmt,encoder=1", "1 and 4 layers"), ("awd-lm,vocabulary=20", "less than the text's 128"),
        ("clip-tiny,vocabulary=20", "less than the text's 128"),
        ("clip-tiny,patch=5", "16 is not a multiple of patch: 5"),
        ("llava-tiny,tensor=2,sequence_parallel=true", "cannot be split along their sequences"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense(text, message):
    with pytest.raises(BadInput, match=message):
        zoo.load(text)(1)


def test_batch_must_be_positive():
    with pytest.raises(BadInput, match="batch: 0"):
        zoo.load("gpt-tiny")(0)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "awd-lm,embedding=32,hidden=48,vocabulary=128,sequence=16"])
def test_language_models_do_not_see_the_future(name):
    layers, x, _ = zoo.load(name)(2)
    changed = x.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 128
    torch.testing.assert_close(layers(x)[:, :8], layers(changed)[:, :8])
    assert not torch.allclose(layers(x)[:, 8:], layers(changed)[:, 8:])


def test_the_translator_sees_all_of_the_source_and_the_past_of_the_target():
    sequence = 16
    layers, x, _ = zoo.load("gnmt,hidden=32,vocabulary=128,sequence=16")(2)
    source, target = x.clone(), x.clone()
    source[:, sequence - 1] = (source[:, sequence - 1] + 1) % 128
    target[:, sequence + 8 :] = (target[:, sequence + 8 :] + 1) % 128
    assert not torch.allclose(layers(x)[:, 0], layers(source)[:, 0])
    torch.testing.assert_close(layers(x)[:, :8], layers(target)[:, :8])


def test_the_translators_target_is_its_source_in_upper_case():
    x, target = zoo.load("gnmt,sequence=20").data(3)(0, 0)
    for row, expected in zip(x.tolist(), target.tolist(), strict=True):
        assert bytes(row[:20]).upper() == bytes(expected)
        assert row[20:] == [0, *expected[:-1]]


def test_rotary_positions_make_attention_depend_on_distance():
    block = zoo.load("llama-tiny")(1)[0].block0
    vector = torch.randn(16)
    rotated = block.rotated(vector.expand(1, 64, 1, 16))[0, :, 0]
    products = rotated @ rotated.T
    torch.testing.assert_close(products.diagonal(3), products.diagonal(3)[:1].expand(61))
    assert not torch.allclose(products[0, 3], products[0, 9])


TINY = "blocks=2,hidden=64,heads=4,expert_width=32,vocabulary=128,sequence=16,experts=4,chosen=2"


def test_tokens_get_what_their_experts_make():
    experts = zoo.load(f"mixtral-8x7b,{TINY},groups=2")(2)[0].block1.experts
    x = torch.randn(2, 16, 64)
    wanted = []
    for token in x.flatten(0, 1):
        shares, chosen = experts.router(token).softmax(-1).topk(2)
        made = [(token @ experts.widen[k]).chunk(2) for k in chosen]
        made = [
            (torch.nn.functional.silu(gate) * up) @ experts.narrow[k]
            for (gate, up), k in zip(made, chosen, strict=True)
        ]
        wanted.append(sum(share * x for share, x in zip(shares / shares.sum(), made, strict=True)))
    torch.testing.assert_close(experts(x).flatten(0, 1), torch.stack(wanted))


@pytest.mark.parametrize(
    "name",
    [
        f"qwen3-30b-a3b,{TINY},groups=2,width=16",
        f"deepseek-v3,{TINY},groups=4,feed_forward=96,dense=1,width=16,latent=32,query_latent=48,rotary=8",
    ],
)
def test_mixtures_learn(name):
    layers, x, loss = zoo.load(name)(4)
    target = zoo.load(name).data(4)(0, 0)[1]
    step, losses = torch.optim.Adam(layers.parameters(), 1e-2), []
    for _ in range(20):
        losses.append(loss(layers(x), target))
        step.zero_grad()
        losses[-1].backward()
        step.step()
    assert losses[-1] < 0.7 * losses[0]


def test_the_auxiliary_logits_travel_beside_the_features():
    layers, x, loss = zoo.load("inception-v3-auxiliary,classes=5")(2)
    target = torch.tensor([1, 4])
    with torch.no_grad():
        layers.eval()
        features = layers[: list(dict(layers.named_children())).index("auxiliary")](x)
        main = features
        for name in ("mixed7a", "mixed7b", "mixed7c", "head"):
            main = getattr(layers, name).body(main)
        auxiliary = layers.auxiliary.body(features)
        output = layers(x)
        torch.testing.assert_close(output, torch.cat((main, auxiliary), dim=1))
        cross_entropy = torch.nn.functional.cross_entropy
        expected = cross_entropy(main, target) + 0.4 * cross_entropy(auxiliary, target)
        torch.testing.assert_close(loss(output, target), expected)


def test_a_microbatch_of_which_only_the_shape_is_asked_takes_no_memory():
    for name in ("gpt-tiny", "gnmt", "small-cnn"):
        with FakeTensorMode():
            x, target = zoo.load(name).data(10**12)(0, 0)
        small, few = zoo.load(name).data(2)(0, 0)
        assert (x.shape[1:], x.dtype, len(x)) == (small.shape[1:], small.dtype, 10**12)
        assert (target.shape[1:], target.dtype) == (few.shape[1:], few.dtype)


def test_unfused_attention_and_other_losses_compute_the_same():
    name = "gpt-tiny,blocks=1"
    one, others = zoo.load(name), (f"{name},attention=unfused,loss=fp32", f"{name},loss=fused")
    x, target = one.data(2)(0, 0)
    results = []
    for model in (one, *map(zoo.load, others)):
        layers, _, loss = model(2)
        found = loss(layers(x), target)
        found.backward()
        results.append((found, layers.block0.attention.weight.grad, layers.head.weight.grad))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-6)
    for wrong, message in (("attention=flash", "is neither"), ("loss=fp64", "isn't one of same, fp32, fused")):
        with pytest.raises(BadInput, match=message):
            zoo.load(f"{name},{wrong}")(2)


def test_a_rank_has_its_part_of_a_table_that_padding_makes_as_long_as_the_whole():
    layers, _, _ = zoo.load("gpt-tiny,blocks=1,tensor=2,part=1")(1)
    assert not layers.embedding.tokens.weight.any()
    assert not layers.head.weight.any()
