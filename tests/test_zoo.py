import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from pipeplan import zoo  # noqa: E402
from pipeplan.errors import BadInput  # noqa: E402
from pipeplan.zoo.data import corpus  # noqa: E402

# parameters as published: Radford et al. 2019 (head tied)
PUBLISHED = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}
MYELIN_BILLIONS = {"myelin-12b": 12, "myelin-24b": 24, "myelin-50b": 50, "myelin-100b": 100}
SMALL = ["gpt-tiny", "small-cnn"]


def count(layers):
    return sum(p.numel() for p in layers.parameters())


def on_meta(name, **options):
    with torch.device("meta"):
        return zoo.load(name)(1, **options)


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_published_parameter_counts(name, parameters):
    layers, example_input, _ = on_meta(name)
    assert count(layers) == parameters
    assert example_input.is_meta


@pytest.mark.parametrize(("name", "billions"), MYELIN_BILLIONS.items())
def test_myelin_sizes_round_to_the_table(name, billions):
    layers, _, _ = on_meta(name)
    assert count(layers) / 1e9 == pytest.approx(billions, rel=0.025)
    model = zoo.load(name).config
    formula = 12 * model.blocks * model.hidden**2  # Myelin's flop count, section VI.D, is 8 of these per token
    assert count(layers) == pytest.approx(formula, rel=0.025)


def test_all_names_load_and_run_on_meta():
    assert len(zoo.MODELS) > len(SMALL)
    for name in zoo.MODELS:
        layers, x, loss = on_meta(name)
        with torch.device("meta"):
            _, target = zoo.load(name).data(1)(0, 0)
            assert loss(layers(x), target).shape == (), name


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


@pytest.mark.parametrize("name", SMALL)
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


@pytest.mark.parametrize(("name", "steps", "rate"), [("gpt-tiny", 30, 1e-2), ("small-cnn", 30, 1e-2)])
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
        ("gpt-tiny,depth=2", "no option is named 'depth'; this model has blocks"),
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
        ("gpt-tiny,vocabulary=50", "less than the text's 128"),
        ("gpt-tiny,sequence=10000000", "longer than the text"),
        ("small-cnn,image=2", "cannot be halved"),
    ],
)
def test_options_that_make_no_sense(text, message):
    with pytest.raises(BadInput, match=message):
        zoo.load(text)(1)


def test_batch_must_be_positive():
    with pytest.raises(BadInput, match="batch: 0"):
        zoo.load("gpt-tiny")(0)
