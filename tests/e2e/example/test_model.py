"""GPT-2 of the example: shapes, attention, saved weights, and untouched random state."""

import math

import pytest
import torch
from torch.nn import functional

from examples.gpt2.model import GPT, GPTConfig

SMALL = GPTConfig(vocab_size=256, block_size=16, n_layer=2, n_head=2, n_embd=32, dropout=0.0)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(SMALL)


def test_a_position_does_not_attend_to_later_ones(model):
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 256
    assert torch.equal(model(tokens)[0, :10], model(changed)[0, :10])
    assert not torch.equal(model(tokens)[0, 10:], model(changed)[0, 10:])


def test_the_model_learns_one_batch_from_a_uniform_guess_and_has_its_tied_weight_once(model):
    tokens = torch.randint(256, (4, 17))
    optimizer = torch.optim.AdamW(model.parameter_groups(0.1), 1e-2)
    losses = []
    for _ in range(20):
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(256), abs=0.1) and losses[-1] < losses[0] / 2
    storages = [tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()]
    assert len(storages) == len(set(storages))


@pytest.mark.parametrize("bias", [True, False])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(bias):
    model = GPT(GPTConfig(256, 16, 2, 2, 32, bias=bias))
    groups = model.parameter_groups(0.1)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(map(id, model.parameters()))
    assert all((p.dim() >= 2) == (g["weight_decay"] > 0) for g in groups for p in g["params"])
    assert any(name.endswith("bias") for name, _ in model.named_parameters()) == bias


def test_initial_projections_shrink_with_the_depth_of_the_model():
    torch.manual_seed(0)
    block = GPT(GPTConfig(256, 16, 8, 4, 128)).blocks[0]
    assert block.attention.projection.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert block.perceptron[0].weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_generated_text_is_reproducible_and_leaves_training_unchanged(model):
    model.train()
    before = torch.get_rng_state()
    text = model.generate(b"def ", length=40, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert text == model.generate(b"def ", length=40, seed=1) != model.generate(b"def ", length=40, seed=2)
    assert text.startswith(b"def ")
    assert len(text) == 44


def test_a_number_of_heads_that_does_not_divide_the_width_is_refused():
    with pytest.raises(ValueError, match="n_embd is 30"):
        GPTConfig(n_embd=30, n_head=4)
