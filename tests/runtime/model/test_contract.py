import pytest

torch = pytest.importorskip("torch")

from dataclasses import replace

from cases.runtime import zoo_chain
from torch import nn

from pipeplan.errors import BadInput, CodeFailed
from pipeplan.runtime.model.build.fitting import check_model, fitted
from pipeplan.runtime.model.build.loading import load_model
from pipeplan.runtime.model.build.spec import ModelSpec, find
from pipeplan.runtime.model.contract import built_by, contract, example_of, sample_of
from pipeplan.runtime.model.trace.adapted import called
from pipeplan.runtime.model.trace.exported import loss_in
from pipeplan.runtime.profiler.measure import built_network
from pipeplan.runtime.profiler.steps import MeasureOptions


def test_a_zoo_model_brings_its_data_and_is_seeded():
    one, same, other = (load_model(ModelSpec("small-cnn"), 4, seed) for seed in (3, 3, 4))
    states = [nn.Sequential(*(x.module for x in model.layers)).state_dict() for model in (one, same, other)]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert not all(torch.equal(states[0][k], states[2][k]) for k in states[0])
    (x,), target = one.data(0, 3)
    assert tuple(x.shape) == one.boundaries[0].shape
    assert target.shape == (4,)
    assert [prefix for prefix, _ in one.roots] == [f"{layer.name}." for layer in one.layers[:-1]]


def test_a_model_of_the_user_is_found_and_seeded():
    spec = ModelSpec("cases.runtime:healthy", "cases.runtime:vectors")
    model = load_model(spec, 4, 0)
    assert [str(spec) for spec in model.boundaries] == ["float32 (4, 16)"] * 6
    assert [prefix for prefix, _ in model.roots] == ["0.", "1.", "2.", "3.", "4."]
    assert all(module.training for layer in model.layers[:-1] for module in layer.module.modules())


def test_reading_the_shapes_leaves_statistics_and_randomness_alone():
    model = load_model(ModelSpec("small-cnn"), 4, 0)
    assert all(
        not b.any()
        for x in model.layers
        for name, b in x.module.named_buffers()
        if name.endswith("num_batches_tracked")
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("cases.runtime:nothing", "has no 'nothing'"),
        ("cases.runtime:not_a_function", "is a int, which cannot be called"),
    ],
)
def test_what_cannot_be_found_is_named(text, words):
    with pytest.raises(BadInput, match=words):
        find(text)


def test_a_model_of_the_user_needs_data():
    with pytest.raises(BadInput, match="needs data to train on"):
        load_model(ModelSpec("cases.runtime:healthy"), 4, 0)


@pytest.fixture(scope="module")
def cnn():
    return zoo_chain("small-cnn", 4), load_model(ModelSpec("small-cnn"), 4, 0)


def test_a_model_matches_its_own_profile(cnn):
    chain, model = cnn
    check_model(model, chain)


def changed(chain, index, **change):
    layers = list(chain.layers)
    layers[index] = replace(layers[index], **change)
    return replace(chain, layers=tuple(layers))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: replace(c, layers=c.layers[:-1]), "has 5 layers; the plan's profile test has 5, and should have 6"),
        (lambda c: replace(c, input_bytes=5), r"example input has 49152 bytes; .* says 5 for microbatches of 4"),
        (lambda c: changed(c, 1, weight_bytes=7), r"layer 1 \(block1\) has 18688 bytes of parameters; .* says 7"),
        (lambda c: changed(c, 2, output_bytes=9), r"layer 2 \(block2\) puts out 65536 bytes, float32 \(4, 64, 8, 8\)"),
    ],
)
def test_every_difference_from_the_profile_is_named(cnn, change, words):
    chain, model = cnn
    with pytest.raises(BadInput, match=words):
        check_model(fitted(model, change(chain)), change(chain))


class Rounding(nn.Module):
    def forward(self, x):
        return x.long()


def rounding(batch):
    return [nn.Linear(2, 2), Rounding(), nn.Embedding(3, 2)], torch.zeros(batch, 2), nn.functional.mse_loss


def pair(index, seed):
    return torch.zeros(1, 2), torch.zeros(1, 2, 2)


def test_integers_cross_a_cut_of_layers_without_a_gradient():
    model = load_model(ModelSpec(f"{__name__}:rounding", f"{__name__}:pair"), 1, 0)
    cut = model.cut(2)
    assert str(cut.forward) == "int64 (1, 2)"
    assert cut.trained == ()
    assert cut.backward.nbytes == 1


def failing(batch):
    return [nn.Linear(2, 2), nn.Linear(3, 2)], torch.zeros(batch, 2), nn.functional.mse_loss


def test_a_layer_that_fails_on_the_example_is_named():
    with pytest.raises(CodeFailed, match=r"layers\[1\]: failed on float32 \(1, 2\)"):
        load_model(ModelSpec(f"{__name__}:failing", f"{__name__}:pair"), 1, 0)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ModelSpec("no_such_module:build"), "model no_such_module:build: needs data to train on"),
        (ModelSpec("no_such_module:build", "data"), "'data' is not of the form module:function"),
        (ModelSpec("gpt-tiny", ":data"), "':data' is not of the form module:function"),
        (ModelSpec(":build", "no_such_module:data"), "':build' is not of the form module:function"),
        (ModelSpec("models/mine.py:build", "data:data"), "'models/mine.py' is a file; .*: models.mine:build"),
        (ModelSpec("gpt-huge"), "no model is named 'gpt-huge'"),
        (ModelSpec("zoo:gpt-tiny,rooms=3"), "no option is named 'rooms'"),
    ],
)
def test_what_is_missing_is_seen_without_importing_anything(spec, words):
    with pytest.raises(BadInput, match=words):
        spec.check()


def test_what_may_be_there_is_left_to_those_who_import_it():
    ModelSpec("no_such_module:build", "no_such_module:data").check()
    ModelSpec("zoo:gpt-tiny,blocks=2").check()


def test_two_inputs_are_no_input_and_its_target():
    a, b, c = torch.zeros(3), torch.ones(3), torch.ones(2)
    assert sample_of((a, b), None, 2) == ((a, b), None)
    assert sample_of((a, b), None, 1) == sample_of((a, b), nn.functional.mse_loss, 2) == (a, b)
    assert sample_of(((a, b), c), None, 2) == ((a, b), c)
    assert sample_of(({"x": a, "y": b}, c), None, 2) == ({"x": a, "y": b}, c)


class Labelled(nn.Linear):
    """A model that takes its labels, or none, and returns its loss behind its output, as many hand-written ones do."""

    def forward(self, x, target=None):
        y = super().forward(x)
        return y, None if target is None else nn.functional.mse_loss(y, target)


def test_a_build_without_parameters_leaves_the_example_to_the_data():
    def data(index, seed):
        return torch.ones(2, 3), torch.zeros(2, 4)

    def with_loss():
        return [nn.Linear(3, 4)], None, nn.functional.mse_loss

    found = [built_network(built_by(build, 2), data, MeasureOptions()) for build in (lambda: Labelled(3, 4), with_loss)]
    assert [[tuple(x.shape) for x in network.inputs] for network, *_ in found] == [[(2, 3), (2, 4)], [(2, 3)]]
    assert [target is None for _, _, target, _ in found] == [True, False]
    with pytest.raises(BadInput, match=r"is called as <lambda>\(batch\)"):
        built_by(lambda: ([nn.Linear(3, 4)], torch.ones(2, 3), nn.functional.mse_loss), 2)


def test_a_pair_of_data_goes_in_where_the_model_takes_both_and_has_no_other_loss():
    a, b = torch.ones(2, 3), torch.zeros(2, 4)
    assert example_of(contract(Labelled(3, 4)), lambda *_: (a, b)) == ((a, b), None)
    assert example_of(contract((Labelled(3, 4), a)), lambda *_: (a, b)) == (a, b)
    assert example_of(contract(nn.Bilinear(3, 4, 1)), lambda *_: ({"x": a}, b)) == ({"x": a}, b)
    assert example_of(contract((Labelled(3, 4), None, nn.functional.mse_loss)), lambda *_: (a, b)) == (a, b)


class Whole(nn.Linear):
    """A model that takes all of a batch as one argument."""

    def forward(self, batch):
        x, target = batch.values() if isinstance(batch, dict) else batch
        return nn.functional.mse_loss(super().forward(x), target)


@pytest.mark.parametrize("turned", [False, True])
def test_a_batch_that_is_one_argument_is_read_by_its_names_or_as_it_is_built(turned):
    a, b = torch.ones(2, 3), torch.zeros(2, 4)
    named = {"x": a, "target": b}
    given = dict(reversed(named.items())) if turned else named
    for example, data in ((named, given), ((named,), given), (((a, b),), (a, b))):
        built = contract((Whole(3, 4), example))
        x, target = example_of(built, lambda *_, data=data: data)
        assert called(built.layers, x) == built.layers(named)
        assert target is None


def test_a_loss_is_the_first_or_the_only_number_of_a_tuple():
    number, other, tensor = torch.tensor(1.0), torch.tensor([2.0]), torch.ones(3)
    found = [
        loss_in(nn.Identity(), x) for x in (number, (number, other), (tensor, other), {"loss": other, "x": number})
    ]
    assert [(float(x), x.dim()) for x in found] == [(1.0, 0), (1.0, 0), (2.0, 0), (2.0, 0)]
    for output in (tensor, (tensor, tensor), (tensor, number, other), (), {"x": number}):
        with pytest.raises(BadInput, match="without a loss, and build gave none"):
            loss_in(nn.Identity(), output)
